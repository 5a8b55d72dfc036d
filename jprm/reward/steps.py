"""From tokens to steps and back: sums over the tokens of a step, and values of steps spread over their tokens.

Both are written as a compare-and-reduce over ``[R, T, S]`` instead of a scatter or a gather. XLA fuses the compare into the
reduce, so nothing of that size is stored; a row never leaves its device; and values under a false mask cannot leak, not even as
``0 * NaN``.
"""

import jax
import jax.numpy as jnp


def sum_by_step(values_RxT: jax.Array, step_RxT: jax.Array, mask_RxT: jax.Array, max_steps: int) -> tuple[jax.Array, jax.Array]:
    """Sum of a token quantity over each step (a sum, never a mean: prefix values must telescope).

    Args:
      values_RxT: f32[R, T]; ignored, even NaN, where ``mask_RxT`` is False.
      step_RxT: i32[R, T] index of the step a token belongs to, -1 outside.
      mask_RxT: bool[R, T] the tokens that count.
      max_steps: S, static.

    Returns:
      ``(sums f32[R, S], exists bool[R, S])``; a step exists where it owns at least one counted token.

    Example:
      >>> sum_by_step(jnp.array([[-.4, .2, -.3, -.1]]), jnp.array([[0, 0, 1, 1]]), jnp.ones((1, 4), bool), 3)[0].round(1)
      Array([[-0.2, -0.4,  0. ]], dtype=float32)
    """
    belongs = (step_RxT[:, :, None] == jnp.arange(max_steps)) & mask_RxT[:, :, None]
    sums = jnp.sum(jnp.where(belongs, values_RxT.astype(jnp.float32)[:, :, None], 0.0), axis=1)
    return sums, jnp.any(belongs, axis=1)


def at_tokens(values_RxS: jax.Array, step_RxT: jax.Array) -> jax.Array:
    """The value of its step at every token, f32[R, T]; 0 where ``step_RxT`` is -1."""
    belongs = step_RxT[:, :, None] == jnp.arange(values_RxS.shape[1])
    return jnp.sum(jnp.where(belongs, values_RxS.astype(jnp.float32)[:, None, :], 0.0), axis=2)


def last_tokens(step_RxT: jax.Array, mask_RxT: jax.Array) -> jax.Array:
    """bool[R, T]: True on the last counted token of every step."""
    none = jnp.iinfo(jnp.int32).max
    step = jnp.where(mask_RxT & (step_RxT >= 0), step_RxT, none)
    # steps are numbered in order, so the smallest index still to come is that of the next counted token
    following = jax.lax.cummin(step, axis=1, reverse=True)
    following = jnp.concatenate([following[:, 1:], jnp.full_like(following[:, :1], none)], axis=1)
    return following > step
