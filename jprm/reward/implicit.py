r"""The implicit process reward model: a language model whose log-ratio to a reference *is* the reward.

.. math::  q_t = \log\pi_\phi(y_t|\cdot) - \log\pi_{ref}(y_t|\cdot),\qquad r_t = \beta q_t,\qquad
           Q_t = \beta\sum_{s\le t} q_s,\qquad r_\phi(y) = \beta S = \beta\sum_t q_t

Trained on outcomes only, Q_t is the soft value :math:`\beta\log E_{ref}[e^{r_\phi/\beta}\,|\,y_{\le t}]` of a prefix for *any*
loss on r_phi, so r_t = Q_t - Q_{t-1} credits a token, and sums of r_t credit a step. S is a difference of large numbers: both
log-probs come in fp32 from the same function at the same shapes, untempered; then a PRM equal to its reference gives exactly 0.

References: Yuan et al., Free Process Rewards without Process Labels (arXiv 2412.01981); Cui et al., PRIME (arXiv 2502.01456).
"""

import jax
import jax.numpy as jnp

from jprm.reward.steps import sum_by_step


def log_ratio(prm_logp_RxT: jax.Array, ref_logp_RxT: jax.Array, mask_RxT: jax.Array) -> jax.Array:
    """q, f32[R, T]; 0 off the mask; gradient to the PRM only, also when the reference is the policy in training."""
    ref = jax.lax.stop_gradient(ref_logp_RxT.astype(jnp.float32))
    return jnp.where(mask_RxT, prm_logp_RxT.astype(jnp.float32) - ref, 0.0)


def token_rewards(q_RxT: jax.Array, mask_RxT: jax.Array, beta: float) -> jax.Array:
    """beta * q as a reward, f32[R, T], gradient stopped. The last token (EOS) keeps its reward."""
    return jax.lax.stop_gradient(beta * jnp.where(mask_RxT, q_RxT.astype(jnp.float32), 0.0))


def step_rewards(
    q_RxT: jax.Array, mask_RxT: jax.Array, step_RxT: jax.Array, max_steps: int, beta: float
) -> tuple[jax.Array, jax.Array]:
    """``(r f32[R, S], exists bool[R, S])``: the sum of token rewards over each step, i.e. Q at its end minus Q at its start."""
    return sum_by_step(token_rewards(q_RxT, mask_RxT, beta), step_RxT, mask_RxT, max_steps)


def outcome_rewards(q_RxT: jax.Array, mask_RxT: jax.Array, beta: float) -> jax.Array:
    """beta * S, f32[R]; differentiable. 0 for a row without tokens."""
    return beta * jnp.sum(jnp.where(mask_RxT, q_RxT.astype(jnp.float32), 0.0), axis=1)


# ------------------------------------------------------------------------------------------------ training on outcomes


def usable_rows(mask_RxT: jax.Array, outcome: jax.Array, known: jax.Array) -> jax.Array:
    """bool[R]: rows that can teach: labelled, the label a finite number, and at least one token to put it on."""
    return known & jnp.isfinite(outcome) & jnp.any(mask_RxT, axis=1)


def balanced_weights(outcome: jax.Array, usable: jax.Array) -> jax.Array:
    """Row weights, f32[R], with which right and wrong rows of a *whole batch* weigh the same in total.

    Computed over the batch and handed to :func:`ce_loss` row by row, so micro-batches stay exact. With soft labels a row is split
    between the classes. Where one class is missing the other keeps half the weight; a weighted mean does not see the difference.

    Args:
      outcome: f32[R] in [0, 1].
      usable: bool[R], see :func:`usable_rows`; other rows get 0.
    """
    right = jnp.where(usable, jnp.clip(outcome, 0.0, 1.0), 0.0)
    wrong = jnp.where(usable, 1.0 - right, 0.0)
    n, n_right, n_wrong = jnp.sum(usable, dtype=jnp.float32), jnp.sum(right), jnp.sum(wrong)

    def share(part, total):
        return jnp.where(total > 0, part * n / (2.0 * jnp.where(total > 0, total, 1.0)), 0.0)

    return share(right, n_right) + share(wrong, n_wrong)


def ce_loss(
    q_RxT: jax.Array,
    mask_RxT: jax.Array,
    outcome: jax.Array,
    known: jax.Array,
    *,
    beta: float,
    row_weight: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    r"""Cross-entropy of an outcome label under :math:`\sigma(\beta S)`, in log-sigmoid form (finite and with gradient at any S).

    .. math::  L = -o\,\log\sigma(\beta S) - (1-o)\,\log\sigma(-\beta S),\quad
                \partial L/\partial q_t = \beta(\sigma(\beta S) - o)

    Args:
      q_RxT: f32[R, T] from :func:`log_ratio`; ignored, even NaN, off the mask.
      mask_RxT: bool[R, T] response tokens of valid rows.
      outcome: f32[R] in [0, 1], soft labels allowed; values outside are clipped. NaN rows are excluded.
      known: bool[R] False rows are excluded.
      beta: of training. It belongs to the response length: .05 to a thousand tokens, .1 to 1 to a few dozen.
      row_weight: f32[R], e.g. :func:`balanced_weights`; 1 by default.

    Returns:
      ``(sum, weight, metrics)``: the weight is the sum of row weights over usable rows. Metrics over usable rows: ``accuracy``
      (sign of S against o > 1/2; S = 0 counts half), ``abs_sum`` (|S|, raw), ``excluded`` (share of all rows of the call that
      are not usable).
    """
    usable = usable_rows(mask_RxT, outcome, known)
    label = jnp.clip(jnp.where(usable, outcome.astype(jnp.float32), 0.0), 0.0, 1.0)
    score = outcome_rewards(q_RxT, mask_RxT, beta)
    weight = jnp.where(usable, 1.0 if row_weight is None else row_weight.astype(jnp.float32), 0.0)
    loss = -label * jax.nn.log_sigmoid(score) - (1.0 - label) * jax.nn.log_sigmoid(-score)

    total = jax.lax.stop_gradient(outcome_rewards(q_RxT, mask_RxT, 1.0))
    hit = jnp.where(total == 0, 0.5, (total > 0) == (label > 0.5))
    n = jnp.sum(usable, dtype=jnp.float32)
    metrics = {
        "accuracy": (jnp.sum(jnp.where(usable, hit, 0.0)), n),
        "abs_sum": (jnp.sum(jnp.where(usable, jnp.abs(total), 0.0)), n),
        "excluded": (jnp.sum(~usable, dtype=jnp.float32), jnp.float32(usable.shape[0])),
    }
    return jnp.sum(jnp.where(usable, weight * loss, 0.0)), jnp.sum(weight), metrics


# ------------------------------------------------------------------------------------------------ does it rank?


def auc(score: jax.Array, outcome: jax.Array, usable: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(sum, weight)`` of pairs (right row, wrong row) of the batch that the score orders rightly; ties count half.

    The quotient is the area under the ROC curve; weight 0 where one class is missing. Call it on the whole batch, not on
    micro-batches. It mixes prompts, easy ones against hard ones; :func:`pair_accuracy` compares within prompts.
    """
    return _ordered_pairs(score[None], outcome[None], usable[None])


def pair_accuracy(score: jax.Array, outcome: jax.Array, usable: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """The same over pairs of one prompt (``group`` neighbouring rows); groups of one class add nothing."""
    return _ordered_pairs(*(x.reshape(-1, group) for x in (score, outcome, usable)))


def _ordered_pairs(score_BxM, outcome_BxM, usable_BxM):
    right = usable_BxM & (outcome_BxM > 0.5)
    wrong = usable_BxM & (outcome_BxM <= 0.5)
    better, worse = score_BxM[:, :, None], score_BxM[:, None, :]
    pairs = right[:, :, None] & wrong[:, None, :]
    hit = jnp.where(better == worse, 0.5, (better > worse).astype(jnp.float32))
    return jnp.sum(jnp.where(pairs, hit, 0.0)), jnp.sum(pairs, dtype=jnp.float32)
