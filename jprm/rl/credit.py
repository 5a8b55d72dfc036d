"""What a token or a step is worth, given what follows or precedes it in its row."""

import jax
import jax.numpy as jnp

from jprm.rl.rollouts import Rollouts
from jprm.rl.signal import Op, Signal, total


def suffix_sums(rewards_RxU: jax.Array, mask_RxU: jax.Array, gamma: float = 1.0) -> jax.Array:
    r"""Discounted reward-to-go along the last axis.

    .. math::  R_k = \sum_{j \ge k} \gamma^{\,j-k}\, m_j\, r_j

    Args:
      rewards_RxU: f32[..., U] reward of each unit (token, step or turn). Values off the mask are ignored, even NaN.
      mask_RxU: bool[..., U]. Units need not be contiguous; a gap of n positions discounts by gamma^n.
      gamma: discount per unit, in [0, 1].

    Returns:
      f32[..., U] reward-to-go; 0 off the mask.

    Example:
      >>> suffix_sums(jnp.array([[1.0, 0.0, 2.0]]), jnp.ones((1, 3), bool), gamma=0.5)
      Array([[1.5, 1. , 2. ]], dtype=float32)

    References:
      Shao et al., DeepSeekMath (arXiv 2402.03300), section 4.1.3.
    """
    r = jnp.where(mask_RxU, rewards_RxU.astype(jnp.float32), 0.0)  # before the scan: 0 * NaN would still be NaN after it
    if gamma == 1.0:
        total = jax.lax.cumsum(r, axis=r.ndim - 1, reverse=True)
    else:

        def link(right, left):  # the scan runs from the end, so `right` is what has been accumulated so far
            return right[0] * left[0], left[1] + left[0] * right[1]

        _, total = jax.lax.associative_scan(link, (jnp.full_like(r, gamma), r), axis=r.ndim - 1, reverse=True)
    return jnp.where(mask_RxU, total, 0.0)


def suffix_sums_reference(rewards, mask, gamma=1.0):
    """The same for one row in ten plain lines: what the fast form is tested against."""
    out, total = [0.0] * len(rewards), 0.0
    for k in reversed(range(len(rewards))):
        total = (rewards[k] if mask[k] else 0.0) + gamma * total
        out[k] = total if mask[k] else 0.0
    return out


def potential_differences(potential_RxU: jax.Array, mask_RxU: jax.Array, gamma: float = 1.0, start: float = 0.0) -> jax.Array:
    r"""Rewards that a potential pays: what each unit adds to the value of the prefix before it.

    .. math::  r_k = \gamma\,\Phi_k - \Phi_{prev(k)},\qquad \Phi_{prev(first)} = start

    ``prev`` is the previous *existing* unit, so holes in the mask are stepped over. With gamma 1 it inverts a prefix sum: applied
    to the PRM's Q it gives its token rewards.

    Args:
      potential_RxU: f32[..., U] value of the prefix up to and with unit k. Ignored, even NaN, off the mask.
      mask_RxU: bool[..., U].
      gamma: discount per unit.
      start: the value of the empty prefix.

    References:
      Ng, Harada and Russell 1999, Policy invariance under reward transformations.
    """
    potential = jnp.where(mask_RxU, potential_RxU.astype(jnp.float32), 0.0)
    if not potential.shape[-1]:
        return potential

    def link(left, right):  # the latest unit that exists
        return left[0] | right[0], jnp.where(right[0], right[1], left[1])

    exists, value = jax.lax.associative_scan(link, (mask_RxU, potential), axis=potential.ndim - 1)
    before = jnp.where(exists, value, start)
    before = jnp.concatenate([jnp.full_like(before[..., :1], start), before[..., :-1]], axis=-1)
    return jnp.where(mask_RxU, gamma * potential - before, 0.0)


def group_prior(rollouts: Rollouts) -> jax.Array:
    """f32[R] in (0, 1): how often the *other* rows of the group are right, with half a success and half a failure added.

    It says nothing about the row itself, so what is subtracted because of it leaves the policy gradient unbiased.
    """
    labelled = rollouts.labelled.astype(jnp.float32)
    right = jnp.where(rollouts.labelled, jnp.clip(rollouts.outcome, 0.0, 1.0), 0.0)
    others = total(right, "unit", rollouts.group) - right, total(labelled, "unit", rollouts.group) - labelled
    return (others[0] + 0.5) / (others[1] + 1.0)


def prefix_success(rewards_RxU: jax.Array, prior_R: jax.Array) -> jax.Array:
    r"""Chance of success *before* each unit, f32[R, U]: a prior, moved by the log-odds that an implicit PRM has gathered so far.

    .. math::  V_{k-1} = \sigma\big(\mathrm{logit}\,p_0 + \textstyle\sum_{j<k} r_j\big)

    A PRM trained with cross-entropy on :math:`\sigma(\beta S)` states log-odds of success; before the first unit there are none
    and the value is the prior.

    Args:
      rewards_RxU: f32[R, U] rewards :math:`\beta q` of tokens or steps, 0 where there is none.
      prior_R: f32[R] in (0, 1).
    """
    before = jnp.pad(jnp.cumsum(rewards_RxU, axis=1), ((0, 0), (1, 0)))[:, :-1]  # exactly a function of what came before
    return jax.nn.sigmoid((jnp.log(prior_R) - jnp.log1p(-prior_R))[:, None] + before)


# ------------------------------------------------------------------------------------------------ as operations


def suffix_sum(gamma: float = 1.0) -> Op:
    """Rewards -> reward-to-go, along the units of a row."""
    return lambda s, rollouts: s.with_value(suffix_sums(s.value, s.mask, gamma))


def prefix_sum() -> Op:
    """Rewards -> value of the prefix up to and with each unit."""

    def op(s: Signal, rollouts: Rollouts) -> Signal:
        return s.with_value(jnp.cumsum(s.value, axis=s.value.ndim - 1))

    return op


def difference(gamma: float = 1.0, start: float = 0.0) -> Op:
    """Values of prefixes -> rewards, see :func:`potential_differences`."""
    return lambda s, rollouts: s.with_value(potential_differences(s.value, s.mask, gamma, start))


def value_baseline() -> Op:
    """Rewards of an implicit PRM -> minus what its value of the prefix has moved from the group's prior, per token or step.

    Added to an outcome that is centred on its group, it makes the advantage :math:`o - V_{k-1}`: the PRM is a critic. It depends
    on the prefix alone, so its expected gradient is 0 *whatever the PRM says*: a bad PRM costs variance, never direction.
    """

    def op(s: Signal, rollouts: Rollouts) -> Signal:
        prior = group_prior(rollouts)
        return s.with_value(prior[:, None] - prefix_success(s.value, prior))

    return op
