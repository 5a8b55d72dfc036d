"""The algebra of advantages: a term, an ordered list of operations, a lift to tokens, a weight; summed over channels.

    term -- op -- op -- ... -- lift -- x weight            A = sum of channels -- post-ops, stop_gradient

A *signal* is a value and a mask on a support. A *term* makes one from rollouts; an *op* is a pure function ``(signal, rollouts)
-> signal``. The order of ops is free because the published methods differ in it: one normalises before it accumulates, the next
after.

Signals keep rows flat, ``[R, ...]``, and :func:`total` is the one place that looks at groups. It sums over tokens or steps first
and then views scalars as ``[P, G]``: group statistics move R floats between devices, never tokens, also where a group lies across
devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from jprm.errors import one_of
from jprm.reward.steps import at_tokens, last_tokens, sum_by_step
from jprm.rl.rollouts import Rollouts, grouped

SUPPORTS = ("row", "step", "turn", "token")


@struct.dataclass
class Signal:
    """A value where the mask is True and 0 elsewhere. Make one with :func:`signal`, which enforces the 0."""

    value: jax.Array  # f32[R] | [R, S] | [R, K] | [R, T]
    mask: jax.Array  # bool, same shape
    support: str = struct.field(pytree_node=False)  # one of SUPPORTS

    def with_value(self, value: jax.Array) -> "Signal":
        return signal(value, self.mask, self.support)


Term = Callable[[Rollouts], Signal]
Op = Callable[[Signal, Rollouts], Signal]


def signal(value: jax.Array, mask: jax.Array, support: str) -> Signal:
    """A signal with its value zeroed off the mask: padding, even NaN, ends here and cannot reach a statistic."""
    one_of(support, SUPPORTS, where="jprm.rl.signal.signal.support")
    mask = jnp.broadcast_to(mask, value.shape)
    return Signal(jnp.where(mask, value.astype(jnp.float32), 0.0), mask, support)


# ------------------------------------------------------------------------------------------------ terms


def outcome(rollouts: Rollouts) -> Signal:
    """The verifier's verdict, on rows that have one."""
    return signal(rollouts.outcome, rollouts.labelled, "row")


def column(name: str, support: str, mask: str | None = None) -> Term:
    """A column of the rollouts. Its mask: the column ``mask``, else valid rows (and sampled tokens, for support token)."""

    def term(rollouts: Rollouts) -> Signal:
        value = rollouts.columns[name]
        where = rollouts.token_mask if support == "token" else _over_units(rollouts.valid, value)
        if mask is not None:
            where = where & rollouts.columns[mask].astype(bool)
        return signal(value, where, support)

    return term


def _over_units(x_R, like):
    return x_R.reshape(x_R.shape + (1,) * (like.ndim - 1))


# ------------------------------------------------------------------------------------------------ group sums

KEYS = ("row", "unit", "group", "batch")


def total(x: jax.Array, key: str, group: int) -> jax.Array:
    """Sum over what ``key`` pools, shaped to broadcast against ``x``.

    Args:
      x: f32[R] or [R, U], zero where it must not count.
      key: ``row`` sums the units of a row; ``unit`` the same unit over the G rows of a prompt; ``group`` all units of the G rows;
        ``batch`` everything.
      group: G.
    """
    one_of(key, KEYS, where="jprm.rl.signal.total.key")
    if key == "unit":
        return _group_sum(x, group)
    sums_R = jnp.sum(x, axis=tuple(range(1, x.ndim)))
    if key == "batch":
        return jnp.sum(sums_R)
    return _over_units(sums_R if key == "row" else _group_sum(sums_R, group), x)


def _group_sum(x, group):
    return jnp.repeat(jnp.sum(grouped(x, group), axis=1), group, axis=0, total_repeat_length=x.shape[0])


# ------------------------------------------------------------------------------------------------ ops of shape and place


def apply(function: Callable[[jax.Array], jax.Array]) -> Op:
    """Any elementwise function of the value: affine maps, clips, powers."""
    return lambda s, rollouts: s.with_value(function(s.value))


def keep(rows: Callable[[Rollouts], jax.Array]) -> Op:
    """Drop rows (mask False, value 0) where the predicate bool[R] is False; they then enter no later statistic."""
    return lambda s, rollouts: signal(s.value, s.mask & _over_units(rows(rollouts), s.value), s.support)


def to_steps(max_steps: int) -> Op:
    """Token values summed over each step: support token -> step."""

    def op(s: Signal, rollouts: Rollouts) -> Signal:
        return signal(*sum_by_step(s.value, rollouts.step, s.mask, max_steps), "step")

    return op


def lift(how: str = "all") -> Op:
    """Any support -> token.

    Args:
      how: ``all``: every sampled token of the row (step, turn) gets the value; ``end``: only its last one; ``mean``: value /
        tokens to each.
    """
    one_of(how, ("all", "end", "mean"), where="jprm.rl.signal.lift.how")

    def op(s: Signal, rollouts: Rollouts) -> Signal:
        if s.support == "token":
            return s
        mask = rollouts.token_mask
        if s.support == "row":
            ids = jnp.where(mask, 0, -1)
            s = signal(s.value[:, None], s.mask[:, None], "row")
        else:
            ids = jnp.where(mask, rollouts.step if s.support == "step" else rollouts.turn, -1)
        value = s.value
        if how == "mean":
            count, _ = sum_by_step(jnp.ones(mask.shape), ids, mask, value.shape[1])
            value = value / jnp.maximum(count, 1.0)
        if how == "end":
            mask_end = last_tokens(ids, mask)
            return signal(jnp.where(mask_end, at_tokens(value, ids), 0.0), mask, "token")
        return signal(at_tokens(value, ids), mask, "token")

    return op


# ------------------------------------------------------------------------------------------------ channels


@dataclass(frozen=True)
class Channel:
    """One source of credit. ``__call__`` gives its unweighted token signal."""

    name: str
    term: Term
    ops: tuple[Op, ...]
    weight: float | jax.Array = 1.0

    def __call__(self, rollouts: Rollouts) -> Signal:
        s = self.term(rollouts)
        for op in self.ops:
            s = op(s, rollouts)
        return lift("all")(s, rollouts)


def channel(name: str, term: Term, *ops: Op, weight: float | jax.Array = 1.0) -> Channel:
    """A term and its operations, in order; what is not on tokens at the end is lifted to all tokens of its unit."""
    return Channel(name, term, ops, weight)


def advantage(
    channels: Sequence[Channel], post: Sequence[Op] = ()
) -> Callable[[Rollouts], tuple[jax.Array, dict[str, jax.Array]]]:
    """The weighted sum of channels, then ``post``.

    Returns:
      A pure function ``rollouts -> (advantages f32[R, T], {channel name: its unweighted token signal f32[R, T]})``, zero off the
      sampled tokens of valid rows, gradients stopped on everything.

    Example: GRPO and PS-GRPO.
      >>> from jprm.rl.normalise import norm
      >>> from jprm.rl.credit import suffix_sum
      >>> grpo = advantage([channel("outcome", outcome, norm())])
      >>> ps_grpo = advantage([channel("process", column("step_score", "step", mask="step_mask"), norm(), suffix_sum())])
    """

    def compute(rollouts: Rollouts) -> tuple[jax.Array, dict[str, jax.Array]]:
        sources = {c.name: c(rollouts).value for c in channels}
        mixed = sum(c.weight * sources[c.name] for c in channels)
        s = signal(mixed, rollouts.token_mask, "token")
        for op in post:
            s = op(s, rollouts)
        return jax.lax.stop_gradient((s.value, sources))

    return compute
