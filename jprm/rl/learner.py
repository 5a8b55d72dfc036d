"""A role that learns: its parameters and moments, gradients over micro-batches, and an update that refuses non-finite numbers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

Tree = Any


@flax.struct.dataclass
class Learner:
    """Parameters of one role and the optimizer state that belongs to them."""

    params: Tree
    opt_state: Tree


class Gradient(NamedTuple):
    """Sums over rows: nothing in it has been divided yet.

    loss, weight: f32 scalars; grads: d loss / d params; metrics: {name: (sum, weight)}; rows: what the loss kept of each row.
    """

    loss: jax.Array
    weight: jax.Array
    grads: Tree
    metrics: dict[str, tuple[jax.Array, jax.Array]]
    rows: Tree


def quotient(total: jax.Array, weight: jax.Array) -> jax.Array:
    """The one division at the end of a metric; nan, which is written as null, where it has no data."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), jnp.nan)


# ------------------------------------------------------------------------------------------------ cutting a batch


def cut(tree: Tree, parts: int) -> Tree:
    """``[R, …] -> [parts, R / parts, …]``, strided: part j holds rows j, j + parts, …, so no row changes device."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1), tree)


def paste(tree: Tree) -> Tree:
    """The inverse of :func:`cut`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def scan_rows(fn: Callable[[Tree], Tree], batch: Tree, parts: int) -> Tree:
    """``fn`` over ``parts`` micro-batches, one after the other; results row for row in the order of ``batch``."""
    if parts == 1:
        return fn(batch)
    return paste(jax.lax.map(fn, cut(batch, parts)))


# ------------------------------------------------------------------------------------------------ gradients


def gradient(loss_fn: Callable[[Tree, Tree], tuple], params: Tree, batch: Tree, parts: int = 1) -> Gradient:
    """Sums a loss and its gradient over micro-batches.

    Args:
      loss_fn: ``(params, micro_batch) -> (sum, weight, metrics, rows)``.
      params: differentiated.
      batch: tree of arrays [R, …].
      parts: micro-batches, a divisor of R. The result does not depend on it.
    """

    def value(p, b):
        total, weight, metrics, rows = loss_fn(p, b)
        return total, (weight, metrics, rows)

    value_and_grad = jax.value_and_grad(value, has_aux=True)
    if parts == 1:
        (loss, (weight, metrics, rows)), grads = value_and_grad(params, batch)
        return Gradient(loss, weight, grads, metrics, rows)

    def visit(carry, micro_batch):
        (loss, (weight, metrics, rows)), grads = value_and_grad(params, micro_batch)
        return jax.tree.map(jnp.add, carry, (loss, weight, grads, metrics)), rows

    batches = cut(batch, parts)
    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(value_and_grad, params, first)
    (loss, (weight, metrics, _)), grads = shapes
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (loss, weight, grads, metrics))
    sums, rows = jax.lax.scan(visit, zeros, batches)
    return Gradient(*sums, rows=paste(rows))


def apply(
    tx: optax.GradientTransformation, learner: Learner, g: Gradient, ok: jax.Array
) -> tuple[Learner, jax.Array, dict[str, jax.Array]]:
    """One optimizer update: divides by the weight, once, and keeps everything bit-identical where it must not move.

    The update is left out where ``ok`` is already False, where loss or gradient is not finite (which makes ``ok`` False for the
    rest of the iteration), and where the weight is 0: no row had anything to say.

    Returns:
      (learner, ok, {loss, grad_norm, skipped, empty}).
    """
    some = g.weight > 0
    scale = jnp.where(some, 1.0 / jnp.where(some, g.weight, 1.0), 0.0)
    grads = jax.tree.map(lambda x: x * scale, g.grads)
    loss, norm = g.loss * scale, optax.tree.norm(grads)
    ok = ok & jnp.isfinite(loss) & jnp.isfinite(norm)
    move = ok & some
    # A NaN in the moments would stay for ever: the optimizer sees zeros where its result is thrown away.
    grads = jax.tree.map(lambda x: jnp.where(move, x, 0.0), grads)
    updates, opt_state = tx.update(grads, learner.opt_state, learner.params)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(move, n, o), new, old)
    params = jax.tree.map(lambda p, u: jnp.where(move, p + u, p), learner.params, updates)
    stats = {"loss": loss, "grad_norm": norm, "skipped": (~ok).astype(jnp.float32), "empty": (~some).astype(jnp.float32)}
    return Learner(params, keep(opt_state, learner.opt_state)), ok, stats
