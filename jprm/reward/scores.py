"""Scores of a finished response from the log-ratios of an implicit PRM: per token, per step, for the whole, and for best-of-n.

Four ways to score by steps are in print and rank differently, so each has a name:

* ``single``: what a step adds, beta times the sum of its log-ratios; ``accumulative``: Q at its end, the sum of all so far;
* aggregated by ``min``, ``sum``, ``mean`` or ``last`` over the steps of the response.

``accumulative_last`` is the outcome score beta * S; so is ``single_sum``. beta scales scores; it changes no ranking under min,
sum, mean and last, but a threshold or a sigmoid needs the beta of training, which is kept with the weights.

References: Yuan et al. (arXiv 2412.01981), evaluation code: min and sum of both kinds.
"""

import jax
import jax.numpy as jnp

from jprm.errors import one_of
from jprm.reward.implicit import step_rewards

KINDS = ("single", "accumulative")
AGGREGATIONS = ("min", "sum", "mean", "last")
NAMES = tuple(f"{kind}_{how}" for kind in KINDS for how in AGGREGATIONS)


def step_scores(
    q_RxT: jax.Array, mask_RxT: jax.Array, step_RxT: jax.Array, max_steps: int, beta: float, kind: str = "single"
) -> tuple[jax.Array, jax.Array]:
    """``(scores f32[R, S], exists bool[R, S])``, no gradient.

    Args:
      q_RxT: f32[R, T] log-ratios, ignored off the mask.
      mask_RxT: bool[R, T] response tokens.
      step_RxT: i32[R, T], -1 outside.
      max_steps: S, static.
      beta: of training, unless only the order matters.
      kind: ``single`` or ``accumulative``.
    """
    one_of(kind, KINDS, where="config.eval.first_error_score")
    single, exists = step_rewards(q_RxT, mask_RxT, step_RxT, max_steps, beta)
    return (single if kind == "single" else jnp.where(exists, jnp.cumsum(single, axis=1), 0.0)), exists


def aggregate(scores_RxS: jax.Array, exists_RxS: jax.Array, how: str = "min") -> jax.Array:
    """One number per response, f32[R]; -inf for a response without steps, which so never wins.

    Args:
      scores_RxS: f32[R, S], ignored, even NaN, where no step exists.
      exists_RxS: bool[R, S].
      how: ``min``, ``sum``, ``mean`` or ``last`` (the last existing step).
    """
    one_of(how, AGGREGATIONS, where="jprm.reward.scores.aggregate.how")
    x = jnp.where(exists_RxS, scores_RxS, 0.0)
    n = jnp.sum(exists_RxS, axis=1)
    if how == "min":
        value = jnp.min(jnp.where(exists_RxS, scores_RxS, jnp.inf), axis=1, initial=jnp.inf)
    elif how == "last":
        index = jnp.arange(x.shape[1])
        final = jnp.max(jnp.where(exists_RxS, index, -1), axis=1, keepdims=True, initial=-1)
        value = jnp.sum(jnp.where(index == final, x, 0.0), axis=1)
    else:
        value = jnp.sum(x, axis=1) / (jnp.maximum(n, 1) if how == "mean" else 1)
    return jnp.where(n > 0, value, -jnp.inf)


def response_score(
    q_RxT: jax.Array, mask_RxT: jax.Array, step_RxT: jax.Array, max_steps: int, beta: float, name: str = "single_min"
) -> jax.Array:
    """A score by its name, f32[R]; see the table of this module.

    Example: two responses that ``single_min`` and ``accumulative_sum`` rank oppositely.
      >>> q = jnp.array([[.5, -.4, .5], [.1, .1, .1]]); mask = jnp.ones((2, 3), bool); step = jnp.tile(jnp.arange(3), (2, 1))
      >>> [int(best_of_n(response_score(q, mask, step, 3, 1.0, name), 2)[0]) for name in ("single_min", "accumulative_sum")]
      [1, 0]
    """
    one_of(name, NAMES, where="config.eval.prm_score")
    kind, how = name.split("_")
    return aggregate(*step_scores(q_RxT, mask_RxT, step_RxT, max_steps, beta, kind), how)


def best_of_n(scores: jax.Array, n: int) -> jax.Array:
    """i32[P]: which of the n neighbouring rows of each prompt scores highest; the first among equals."""
    return jnp.argmax(scores.reshape(-1, n), axis=1)
