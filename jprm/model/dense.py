"""Matrix products of the decoder, with the weight gradient written for how CPUs multiply."""

import math

import jax
import jax.numpy as jnp


@jax.custom_vjp
def dense(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x @ weight`` over the last axis of ``x`` and the first of ``weight``: [..., D] x [D, ...] -> [..., ...].

    Its own gradient, because autodiff always puts the cotangent first in the weight's gradient. XLA on CPUs lays the first
    operand out transposed; where that is an MLP's gate, three times as wide as ``x``, the elementwise work before it is fused
    into a strided copy, which took longer than the product itself. Here the narrower of the two goes first.
    """
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())))


def _forward(x, weight):
    return dense(x, weight), (x, weight)


def _backward(saved, g):
    x, weight = saved
    rows = tuple(range(x.ndim - 1))
    out = tuple(range(len(rows), g.ndim))
    over = lambda a, b: jax.lax.dot_general(a, b, ((rows, rows), ((), ())))
    if x.shape[-1] <= math.prod(weight.shape[1:]):
        d_weight = over(x, g)
    else:
        d_weight = jnp.moveaxis(over(g, x), -1, 0)
    return jax.lax.dot_general(g, weight, ((out, tuple(range(1, weight.ndim))), ((), ()))), d_weight


dense.defvjp(_forward, _backward)
