"""Baselines and scales. One operation, :func:`norm`, covers nearly every baseline in print; two rescale a whole signal."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jprm.errors import one_of
from jprm.rl.credit import suffix_sums
from jprm.rl.rollouts import Rollouts
from jprm.rl.signal import Op, Signal, total

CENTERS = ("mean", "loo", "loo_rows", "loo_rows_code", "none")
SCALES = ("std", "none")
ROUNDING = 1e-6  # of a mean in fp32, relative: a spread below it is none


def norm(
    key: str = "group",
    center: str | float = "mean",
    scale: str = "std",
    *,
    where: Callable[[Rollouts], jax.Array] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    eps_in_sqrt: float = 0.0,
    min_n: int = 1,
) -> Op:
    r"""Subtract a baseline, divide by a spread.

    .. math::  y = (x - c) / (\mathrm{std} + eps)\ \text{ where std} > \max(eps, 10^{-6}|\mathrm{mean}|),\ \text{else } 0

    Args:
      key: what is pooled: ``row``, ``unit`` (same step over the group), ``group``, ``batch`` (see :func:`jprm.rl.signal.total`).
      center: ``mean``; ``loo``: the mean of all *other* elements of the pool; ``loo_rows``: the mean over the *other rows* of the
        group of their own means (PRIME's paper; on rows the same as ``loo``); ``loo_rows_code``: the same as PRIME's two code
        bases compute it, :math:`x\,K/(K-1) - \sum_{all} \bar x_j/(K-1)`, which adds :math:`(x - \bar x_i)/(K-1)` and so sharpens
        contrast inside a row; ``none``; or a constant.
      scale: ``std`` (two passes; never E[x^2] - E[x]^2) or ``none``.
      where: predicate bool[R] of the rollouts: only these rows make the statistic, and only they get a value other than 0.
      ddof: 1 is the unbiased std of verl, TRL and OpenRLHF; 0 numpy's.
      eps: outside the root, and the threshold below which a spread counts as none.
      eps_in_sqrt: added to the variance (whitening in verl: 1e-8 with ``eps=0``).
      min_n: pools with fewer elements (rows, for ``loo_rows``) give 0. Leave-one-out needs 2, whatever this says.

    Returns:
      An op. A pool of one gives exactly 0 for every centred estimator.
    """
    if isinstance(center, str):
        one_of(center, CENTERS, where="jprm.rl.normalise.norm.center")
    one_of(scale, SCALES, where="jprm.rl.normalise.norm.scale")

    def op(s: Signal, rollouts: Rollouts) -> Signal:
        mask = s.mask
        if where is not None:
            mask = mask & where(rollouts).reshape((-1,) + (1,) * (mask.ndim - 1))
        x, m = jnp.where(mask, s.value, 0.0), mask.astype(jnp.float32)

        def pool(v):
            return total(v, key, rollouts.group)

        n = pool(m)
        mean = pool(x) / jnp.maximum(n, 1.0)
        enough = n >= min_n
        if center == "mean":
            y = x - mean
        elif center == "loo":
            y = (x - mean) * n / jnp.maximum(n - 1.0, 1.0)
        elif center in ("loo_rows", "loo_rows_code"):
            y, rows = _minus_other_rows(x, m, rollouts.group, as_code=center == "loo_rows_code")
            enough = rows >= max(2, min_n)
        else:
            y = x if center == "none" else x - center
        if scale == "std":
            variance = pool(jnp.square(x - mean) * m) / jnp.maximum(n - ddof, 1.0)
            std = jnp.sqrt(variance + eps_in_sqrt)
            spread = std > jnp.maximum(eps, ROUNDING * jnp.abs(mean))  # seven rewards of .35 have a std of 3e-8, not of 0
            y = jnp.where(spread, y / jnp.where(spread, std + eps, 1.0), 0.0)
        return s.with_value(jnp.where(mask & enough, y, 0.0))

    return op


def _minus_other_rows(x, m, group, as_code):
    """x minus the mean, over the other rows of the group that have a unit, of their row means; and how many rows have one."""
    count = total(m, "row", group)
    row_mean = total(x, "row", group) / jnp.maximum(count, 1.0)
    per_row = (row_mean.reshape(x.shape[0]), (count > 0).astype(jnp.float32).reshape(x.shape[0]))
    means, rows = (total(v, "group", group).reshape(count.shape) for v in per_row)
    others = jnp.maximum(rows - 1.0, 1.0)
    y = x - (means - row_mean) / others
    return (y + (x - row_mean) / others if as_code else y), rows


def whiten(eps_in_sqrt: float = 1e-8) -> Op:
    """Mean 0 and unbiased variance 1 over every counted unit of the batch, as verl's masked_whiten."""
    return norm("batch", "mean", "std", eps=0.0, eps_in_sqrt=eps_in_sqrt)


# ------------------------------------------------------------------------------------------------ scales of a whole signal


def max_return(s: Signal) -> jax.Array:
    """The largest absolute undiscounted reward-to-go of the whole batch, f32[] (all devices, not one worker's share)."""
    return jnp.max(jnp.abs(suffix_sums(s.value, s.mask)), initial=0.0)


def rms(s: Signal) -> jax.Array:
    """Root mean square over the counted units of the whole batch, f32[]; 0 where there are none."""
    n = jnp.sum(jnp.sum(s.mask, axis=-1, dtype=jnp.float32))
    mean_square = jnp.sum(jnp.sum(jnp.square(s.value), axis=-1)) / jnp.maximum(n, 1.0)
    return jnp.where(mean_square > 0, jnp.sqrt(jnp.where(mean_square > 0, mean_square, 1.0)), 0.0)


def scale_to(
    kind: str = "max_return", *, floor: float = 0.0, eps: float = 1e-6, target: float | Callable[[Rollouts], Signal] = 1.0
) -> Op:
    """Rescale a signal by one number of the whole batch; no centring.

    Args:
      kind: ``max_return``: divide by :func:`max_return`, as PRIME's code does (there per worker; here over the batch, so the
        result does not depend on the number of devices). ``rms``: make the signal's rms ``target``; one outlier does not set it.
      floor: least divisor. A PRM that still equals its reference emits rounding noise of 1e-5, and noise divided by its own size
        is a full signal; with a floor it stays small.
      eps: added to the divisor.
      target: for ``rms``: a number, or a channel whose own rms is matched (the process part to the outcome part).
    """
    one_of(kind, ("max_return", "rms"), where="jprm.rl.normalise.scale_to.kind")

    def op(s: Signal, rollouts: Rollouts) -> Signal:
        if kind == "max_return":
            return s.with_value(s.value / (jnp.maximum(max_return(s), floor) + eps))
        goal = rms(target(rollouts)) if callable(target) else target
        return s.with_value(s.value * (goal / (jnp.maximum(rms(s), floor) + eps)))

    return op
