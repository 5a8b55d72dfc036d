"""Which prompts are worth a gradient: accuracy bands, groups with contrast, and keeping P of c x P prompts with fixed shapes.

Selection comes before any statistic and keeps groups whole: it answers per prompt, and marks rows as not ``valid``.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jprm.errors import UserError
from jprm.rl.rollouts import grouped

Tree = TypeVar("Tree")
_ROUNDING = 1e-6  # so that 1 right of 5 meets a bound of 0.2 on every backend


def group_accuracy(outcome: jax.Array, labelled: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """``(mean outcome f32[P], labelled rows f32[P])`` of each group over its labelled rows; mean 0 where there are none."""
    m = grouped(labelled, group).astype(jnp.float32)
    n = jnp.sum(m, axis=1)
    return jnp.sum(jnp.where(m > 0, grouped(outcome, group), 0.0), axis=1) / jnp.maximum(n, 1.0), n


def in_band(outcome: jax.Array, labelled: jax.Array, group: int, low: float, high: float) -> jax.Array:
    """bool[P]: low <= accuracy <= high, bounds included (as PRIME's code; its paper writes <). Groups without labels are out."""
    accuracy, n = group_accuracy(outcome, labelled, group)
    return (n > 0) & (accuracy >= low - _ROUNDING) & (accuracy <= high + _ROUNDING)


def has_contrast(outcome: jax.Array, labelled: jax.Array, group: int, tolerance: float = 1e-6) -> jax.Array:
    """bool[P]: the labelled outcomes of the group are not all equal. False for groups with fewer than two labelled rows."""
    m, x = grouped(labelled, group), grouped(outcome, group)
    top, bottom = jnp.max(jnp.where(m, x, -jnp.inf), axis=1), jnp.min(jnp.where(m, x, jnp.inf), axis=1)
    some = jnp.any(m, axis=1)
    return some & (jnp.where(some, top, 0.0) - jnp.where(some, bottom, 0.0) > tolerance)


def to_rows(per_prompt: jax.Array, group: int) -> jax.Array:
    """``[P] -> [R]``: every row gets its prompt's value (repeat, never tile: rows are prompt-major)."""
    return jnp.repeat(per_prompt, group, axis=0, total_repeat_length=per_prompt.shape[0] * group)


# ------------------------------------------------------------------------------------------------ P of c x P


def keep_prompts(passed: jax.Array, prompts: int, shards: int = 1) -> tuple[jax.Array, jax.Array]:
    """Keep ``prompts`` of the generated ones, those that passed first, in order; the rest is filled with ones that did not.

    Every data shard keeps the same number of its own prompts, so no row changes device and every shape is static. The sort is
    stable: among equals the order of generation decides, on every backend.

    Args:
      passed: bool[c*P], e.g. :func:`in_band`.
      prompts: P to keep, static.
      shards: data shards the rows lie on (mesh data x fsdp), static.

    Returns:
      ``(index i32[shards, P/shards] into the prompts of its own shard, passed bool[P])``; fill-ins read False: set their rows'
      ``valid`` to it.

    Raises:
      UserError: a shard would not hold whole prompts, or equal quotas are impossible.

    Example:
      >>> keep_prompts(jnp.array([False, True, False, True]), 2)
      (Array([[1, 3]], dtype=int32), Array([ True,  True], dtype=bool))
    """
    generated = passed.shape[0]
    if shards < 1 or generated % shards or prompts % shards or prompts > generated:
        raise UserError(
            f"{generated} generated and {prompts} kept prompts on {shards} data shards",
            expected="both multiples of the number of data shards (mesh data x fsdp), and no more kept than generated",
            where="config.rl.prompts",
            fix=f"Set config.rl.prompts to a multiple of {shards}",
        )
    by_shard = passed.reshape(shards, generated // shards)
    order = jnp.argsort(~by_shard, axis=1, stable=True)[:, : prompts // shards].astype(jnp.int32)
    return order, jnp.take_along_axis(by_shard, order, axis=1).reshape(prompts)


def take_prompts(tree: Tree, index: jax.Array, group: int) -> Tree:
    """The rows of the kept prompts from every array ``[c*R, ...]`` of a tree (a ``Rollouts``, say), gathered inside each shard.

    Args:
      tree: arrays whose axis 0 is rows, prompt-major.
      index: i32[shards, P/shards] from :func:`keep_prompts`.
      group: G.
    """
    shards = index.shape[0]
    rows = (index[:, :, None] * group + jnp.arange(group)).reshape(shards, -1)

    def take(x):
        y = x.reshape(shards, x.shape[0] // shards, *x.shape[1:])
        y = jnp.take_along_axis(y, rows.reshape(rows.shape + (1,) * (x.ndim - 1)), axis=1)
        return y.reshape(-1, *x.shape[1:])

    return jax.tree.map(take, tree)
