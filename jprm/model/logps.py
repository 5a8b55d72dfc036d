"""Log-probabilities of given tokens without an array of rows x tokens x vocabulary.

The vocabulary is cut into blocks; a running maximum and sum give the log-normaliser, and the backward pass computes each
block's logits again. Blocks are *strided* (rows j, j + n, j + 2n, … of the head), so that a head whose vocabulary is
sharded over ``tensor`` gives every block an equal share of every shard and nothing moves between devices.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jprm.model.config import ModelConfig
from jprm.model.forward import head_weight
from jprm.model.spec import Params
from jprm.sharding.rules import constrain


def token_logps(
    params: Params,
    cfg: ModelConfig,
    hidden_RxNxD: jax.Array,
    targets_RxN: jax.Array,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Log-probability of each target and entropy of each distribution.

    .. math::  \log p_{rn} = z_{rn,y} - \log\sum_v e^{z_{rn,v}}, \qquad z = h W^\top / \tau

    Args:
      params: the model's tree; only the head is read.
      cfg: the model's shape (static).
      hidden_RxNxD: hidden state *before* each target (the state that predicts it).
      targets_RxN: i32[R, N].
      temperature: :math:`\tau` > 0. Roles that are compared with each other are compared at 1.
      chunk: vocabulary rows per block; default ``cfg.logits_chunk``. A vocabulary of one block is computed densely.

    Returns:
      (logp f32[R, N], at most 0; entropy f32[R, N] in nats, without a gradient).
    """
    chunk = chunk or cfg.logits_chunk
    head_VxD = head_weight(params, cfg).astype(cfg.dtype)
    blocks = math.ceil(cfg.vocab_size / chunk)
    with jax.named_scope("token_logps"):
        logp, entropy = _logps(blocks, float(temperature), hidden_RxNxD, head_VxD, targets_RxN)
    return logp, jax.lax.stop_gradient(entropy)


def token_logps_reference(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """The same, dense, in four lines: what the blocked form is tested against."""
    logp_all = jax.nn.log_softmax(jnp.einsum("rnd,vd->rnv", hidden, head) / temperature, axis=-1)
    entropy = -jnp.sum(jnp.exp(logp_all) * logp_all, axis=-1)
    return jnp.take_along_axis(logp_all, targets[..., None], axis=-1)[..., 0], entropy


def _blocks_of(head_VxD: jax.Array, blocks: int) -> jax.Array:
    """[V, D] -> [blocks, ceil(V / blocks), D], strided; the tail is padded with zeros and masked by its index."""
    V, D = head_VxD.shape
    rows = math.ceil(V / blocks)
    padded = jnp.pad(head_VxD, ((0, rows * blocks - V), (0, 0)))
    return constrain(padded.reshape(rows, blocks, D).swapaxes(0, 1), None, "vocab", None)


def _block_logits(
    hidden: jax.Array, block_CxD: jax.Array, j: Any, blocks: int, vocab: int, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """f32[R, N, C] logits of block j and the vocabulary index of each of its columns."""
    z = jnp.einsum("rnd,cd->rnc", hidden, block_CxD, preferred_element_type=jnp.float32)
    z = constrain(z, "rows", None, "vocab")
    index_C = jnp.arange(block_CxD.shape[0]) * blocks + j
    z = z if temperature == 1.0 else z / temperature
    return (z if vocab % blocks == 0 else jnp.where(index_C < vocab, z, -jnp.inf)), index_C


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _logps(blocks, temperature, hidden, head, targets):
    return _logps_forward(blocks, temperature, hidden, head, targets)[0]


def _logps_forward(blocks, temperature, hidden, head, targets):
    vocab = head.shape[0]

    def visit(carry, xs):
        top, total, weighted, picked = carry  # running max, sum e^{z-max}, sum z e^{z-max}, the target's logit
        block, j = xs
        z, index = _block_logits(hidden, block, j, blocks, vocab, temperature)
        new_top = jnp.maximum(top, jnp.max(z, axis=-1))
        e = jnp.exp(z - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        picked = picked + jnp.sum(jnp.where(targets[..., None] == index, z, 0.0), axis=-1)
        weighted = weighted * shrink + jnp.sum(jnp.where(e > 0, z, 0.0) * e, axis=-1)  # 0 x -inf in the padded tail
        return (new_top, total * shrink + jnp.sum(e, axis=-1), weighted, picked), z

    zero = jnp.zeros(targets.shape, jnp.float32)
    start = (jnp.full(targets.shape, -jnp.inf), zero, zero, zero)
    if blocks == 1:  # small vocabulary: keep the logits for the backward pass instead of computing them twice
        (top, total, weighted, picked), z = visit(start, (head, 0))
    else:
        (top, total, weighted, picked), z = jax.lax.scan(
            lambda c, x: (visit(c, x)[0], None), start, (_blocks_of(head, blocks), jnp.arange(blocks))
        )
    lse = top + jnp.log(total)
    logp = jnp.minimum(picked - lse, 0.0)
    return (logp, lse - weighted / total), (hidden, head, targets, lse, z)


def _logps_backward(blocks, temperature, saved, cotangents):
    hidden, head, targets, lse, z_kept = saved
    g = cotangents[0][..., None]  # the entropy's cotangent is zero by construction (stop_gradient above)
    vocab = head.shape[0]

    def visit(d_hidden, xs):
        block, j = xs
        z, index = (z_kept, jnp.arange(vocab)) if blocks == 1 else _block_logits(hidden, block, j, blocks, vocab, temperature)
        d_z = g * (jnp.where(targets[..., None] == index, 1.0, 0.0) - jnp.exp(z - lse[..., None])) / temperature
        d_z = d_z.astype(head.dtype)  # the two matmuls below run in the compute dtype, accumulating in fp32
        d_hidden = d_hidden + jnp.einsum("rnc,cd->rnd", d_z, block, preferred_element_type=jnp.float32)
        return d_hidden, jnp.einsum("rnc,rnd->cd", d_z, hidden, preferred_element_type=jnp.float32)

    start = jnp.zeros(hidden.shape, jnp.float32)
    if blocks == 1:
        d_hidden, d_head = visit(start, (head, 0))
    else:
        d_hidden, d_blocks = jax.lax.scan(visit, start, (_blocks_of(head, blocks), jnp.arange(blocks)))
        d_head = d_blocks.swapaxes(0, 1).reshape(-1, head.shape[1])[:vocab]
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None


_logps.defvjp(_logps_forward, _logps_backward)
