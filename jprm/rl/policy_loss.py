"""The clipped surrogate and the ways to add up tokens.

Every loss is ``(sum, weight, metrics)``, metrics again being ``{name: (sum, weight)}``. Micro-batches and devices add sums and
weights; the one division comes last. The mean of micro-batch means is another number (token counts differ) and is never formed.
"""

import jax
import jax.numpy as jnp

from jprm.errors import UserError, one_of

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")
MAX_LOG_RATIO = 20.0  # e^20 is finite in fp32 and already far beyond every clip


def aggregate(
    values_RxT: jax.Array, mask_RxT: jax.Array, aggregation: str = "token_mean", constant: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Token values to ``(sum, weight)``.

    ==================  ====================================================  =======================
    aggregation         sum                                                   weight
    ==================  ====================================================  =======================
    ``token_mean``      all tokens (DAPO)                                     tokens
    ``sequence_mean``   over rows, of the row's token mean (GRPO)             rows that have a token
    ``sequence_sum``    over rows, of the row's token sum                     rows that have a token
    ``constant``        over rows, of token sum / ``constant`` (Dr.GRPO)      rows that have a token
    ==================  ====================================================  =======================

    Args:
      values_RxT: f32[R, T]; ignored, even NaN, off the mask.
      mask_RxT: bool[R, T].
      aggregation: one of ``AGGREGATIONS``.
      constant: tokens, for ``constant``: usually the longest response allowed.

    Raises:
      UserError: unknown aggregation, or ``constant`` missing.
    """
    one_of(aggregation, AGGREGATIONS, where="config.rl.aggregation")
    if aggregation == "constant" and not constant:
        raise UserError(
            f"constant={constant!r}",
            expected="a positive number of tokens",
            where="config.rl.aggregation",
            fix="Give the longest response allowed as the constant",
        )
    tokens_R = jnp.sum(mask_RxT, axis=1, dtype=jnp.float32)
    sums_R = jnp.sum(jnp.where(mask_RxT, values_RxT.astype(jnp.float32), 0.0), axis=1)
    rows = jnp.sum(tokens_R > 0, dtype=jnp.float32)
    if aggregation == "token_mean":
        return jnp.sum(sums_R), jnp.sum(tokens_R)
    if aggregation == "sequence_mean":
        return jnp.sum(sums_R / jnp.maximum(tokens_R, 1.0)), rows
    return jnp.sum(sums_R) / (constant if aggregation == "constant" else 1.0), rows


def policy_loss(
    logp_RxT: jax.Array,
    old_logp_RxT: jax.Array,
    advantages_RxT: jax.Array,
    mask_RxT: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "token_mean",
    constant: float | None = None,
    entropy_RxT: jax.Array | None = None,
    entropy_coef: float = 0.0,
) -> tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    r"""PPO's clipped surrogate on token ratios.

    .. math::  \ell_t = -\min\big(\rho_t A_t,\ \mathrm{clip}(\rho_t, 1-\epsilon_{low}, 1+\epsilon_{high}) A_t\big),\quad
               \rho_t = e^{\log\pi - \log\pi_{old}}

    and with ``dual_clip`` c, where A < 0: :math:`\min(\ell_t, -c A_t)`. The log-ratio is clamped to +-20 before the exponential.

    Args:
      logp_RxT: f32[R, T], differentiated.
      old_logp_RxT: f32[R, T]; gradient stopped. With one update per rollout pass ``stop_gradient(logp)``: every ratio is exactly
        1.
      advantages_RxT: f32[R, T]; gradient stopped.
      mask_RxT: bool[R, T] sampled tokens of valid rows. Everything off it is ignored, even NaN, also by the gradient.
      clip_low, clip_high: distances from 1 (DAPO: .2 and .28).
      dual_clip: c > 1, or None.
      aggregation, constant: see :func:`aggregate`.
      entropy_RxT: f32[R, T] for the metric and, times ``entropy_coef``, subtracted from the loss.

    Returns:
      ``(sum, weight, metrics)``; metrics over tokens: ``clip_fraction`` (the clip changed the loss), ``dual_clip_fraction``,
      ``approx_kl`` (mean of rho - 1 - log rho, an estimate of KL(old || new)), ``ratio``, ``entropy``.

    References:
      Schulman et al. 2017 (arXiv 1707.06347); dual clip: Ye et al. 2019 (arXiv 1912.09729); asymmetric: Yu et al. 2025, DAPO.
    """
    mask = mask_RxT
    old = jax.lax.stop_gradient(old_logp_RxT.astype(jnp.float32))
    advantages = jax.lax.stop_gradient(jnp.where(mask, advantages_RxT.astype(jnp.float32), 0.0))
    log_ratio = jnp.where(mask, logp_RxT.astype(jnp.float32) - old, 0.0)
    log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)

    free = -ratio * advantages
    clipped = -jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = jnp.maximum(free, clipped)
    dual_active = jnp.zeros_like(mask)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        dual_active = (advantages < 0) & (loss > bound)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
    if entropy_RxT is not None and entropy_coef:
        loss = loss - entropy_coef * jnp.where(mask, entropy_RxT.astype(jnp.float32), 0.0)
    total, weight = aggregate(loss, mask, aggregation, constant)

    tokens = {
        "clip_fraction": (clipped > free).astype(jnp.float32),
        "dual_clip_fraction": dual_active.astype(jnp.float32),
        "approx_kl": ratio - 1.0 - log_ratio,
        "ratio": ratio,
    }
    if entropy_RxT is not None:
        tokens["entropy"] = entropy_RxT
    return total, weight, {k: aggregate(jax.lax.stop_gradient(v), mask) for k, v in tokens.items()}
