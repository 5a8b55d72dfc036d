r"""How far the policy has moved from a reference, estimated on its own samples.

With :math:`d = \log\pi_\theta - \log\pi_{ref}` at a token sampled from :math:`\pi_\theta`::

    k1 = d          k2 = d^2 / 2          k3 = exp(-d) - 1 + d

*Values*: k1 and k3 have the mean KL(pi || ref); k2 is biased. *Gradients are another matter.* As a loss on on-policy samples,

* E[grad k1] = 0: it holds the policy to nothing;
* E[grad k2] = grad KL(pi || ref), exactly;
* E[grad k3] = grad KL(ref || pi), the other direction (``pi - ref`` on the logits).

So: in the reward, where nothing is differentiated and only values matter, use k1; as a loss k2 (or k3, knowing what it is).

References: Schulman, "Approximating KL divergence" (2020); the golden values in the test of this file were computed by hand.
"""

import jax
import jax.numpy as jnp

from jprm.errors import one_of
from jprm.rl.policy_loss import MAX_LOG_RATIO, aggregate

KINDS = ("k1", "k2", "k3")


def kl_estimate(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array, kind: str = "k3") -> jax.Array:
    """Per-token estimate, f32 like ``logp``, 0 off the mask; differentiable in ``logp`` only.

    ``d`` is clamped to +-20 in k3, whose exponential needs it (the gradient is 0 beyond); k1 and k2 are not clamped.

    Raises:
      UserError: unknown kind.
    """
    one_of(kind, KINDS, where="config.rl.kl_kind")
    d = jnp.where(mask, logp.astype(jnp.float32) - jax.lax.stop_gradient(ref_logp.astype(jnp.float32)), 0.0)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * jnp.square(d)
    d = jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(-d) + d


def kl_loss(
    logp_RxT: jax.Array,
    ref_logp_RxT: jax.Array,
    mask_RxT: jax.Array,
    *,
    kind: str = "k2",
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """KL as a loss term; add ``coef * sum`` to the policy loss of the same aggregation (the weights are equal).

    Returns:
      ``(sum, weight, metrics)``; the metric ``kl`` is the token mean of k1, the plain estimate, whatever ``kind`` is trained on.
    """
    total, weight = aggregate(kl_estimate(logp_RxT, ref_logp_RxT, mask_RxT, kind), mask_RxT, aggregation, constant)
    plain = jax.lax.stop_gradient(kl_estimate(logp_RxT, ref_logp_RxT, mask_RxT, "k1"))
    return total, weight, {"kl": aggregate(plain, mask_RxT)}


def kl_rewards(logp_RxT: jax.Array, ref_logp_RxT: jax.Array, mask_RxT: jax.Array, *, coef: float, kind: str = "k1") -> jax.Array:
    """KL as a reward, f32[R, T]: ``-coef * estimate`` at every token, no gradient."""
    return jax.lax.stop_gradient(-coef * kl_estimate(logp_RxT, ref_logp_RxT, mask_RxT, kind))
