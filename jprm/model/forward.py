"""The decoder as pure functions: one block, used by the full forward pass and, over a cache, by decoding.

Shapes in names: R rows, T tokens, D width, H query heads, K key/value heads, G = H / K, Dh head width, F MLP width,
S key slots, L layers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jprm.model.config import ModelConfig
from jprm.model.dense import dense
from jprm.model.spec import Params
from jprm.sharding.rules import constrain

# Finite, so that a row that sees no key at all softmaxes to something finite instead of NaN.
MASKED = -1e30


class Output(NamedTuple):
    """What a forward pass returns.

    hidden: dtype[R, T, D] after the final norm (what the vocabulary and every reward head read).
    keys, values: dtype[L, R, T, K, Dh] where asked for, else None.
    """

    hidden: jax.Array
    keys: jax.Array | None = None
    values: jax.Array | None = None


def cast_params(params: Params, cfg: ModelConfig) -> Params:
    """Every parameter in the compute dtype, norm scales included: the one place where masters are cast."""
    return jax.tree.map(lambda p: p.astype(cfg.dtype), params)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, statistics in fp32 (Zhang & Sennrich, arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


def rope_tables(positions_RxT: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[R, T, Dh/2]. In fp32 whatever the dtype: bf16 rounds position 257 to 256."""
    half = cfg.head_dim // 2
    frequency = cfg.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_RxTxDh = positions_RxT[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle_RxTxDh), jnp.sin(angle_RxTxDh)


def rotate(x_RxTxHxDh: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding in the half-split layout (pairs i and i + Dh/2), as Hugging Face stores q and k."""
    cos, sin = (t[:, :, None, :] for t in rope)
    a, b = jnp.split(x_RxTxHxDh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_RxTxHxDh.dtype)


def attention(q_RxTxHxDh: jax.Array, k_RxSxKxDh: jax.Array, v_RxSxKxDh: jax.Array, mask_RxTxS: jax.Array) -> jax.Array:
    """Grouped-query attention; softmax in fp32. ``mask`` is bool, True where a query may look; its R may be 1."""
    R, T, H, Dh = q_RxTxHxDh.shape
    K = k_RxSxKxDh.shape[2]
    q = (q_RxTxHxDh * Dh**-0.5).reshape(R, T, K, H // K, Dh)
    scores_RxKxGxTxS = jnp.einsum("rtkgd,rskd->rkgts", q, k_RxSxKxDh, preferred_element_type=jnp.float32)
    scores_RxKxGxTxS = jnp.where(mask_RxTxS[:, None, None], scores_RxKxGxTxS, MASKED)
    weights = jax.nn.softmax(scores_RxKxGxTxS, axis=-1).astype(v_RxSxKxDh.dtype)
    return jnp.einsum("rkgts,rskd->rtkgd", weights, v_RxSxKxDh).reshape(R, T, H, Dh)


def block(layer: Params, cfg: ModelConfig, x_RxTxD: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Any) -> jax.Array:
    """One decoder layer. ``attend(q, k, v) -> [R, T, H, Dh]`` decides what the keys are: this sequence, or a cache."""
    with jax.named_scope("attention"):
        h = rms_norm(x_RxTxD, layer["attn_norm"], cfg.rms_norm_eps)
        q, k, v = (dense(h, layer[n]) for n in "qkv")
        if cfg.qkv_bias:
            q, k, v = q + layer["q_bias"], k + layer["k_bias"], v + layer["v_bias"]
        mixed_RxTxHxDh = attend(rotate(q, rope), rotate(k, rope), v)
        x_RxTxD = x_RxTxD + jnp.einsum("rthe,hed->rtd", mixed_RxTxHxDh, layer["o"])
    with jax.named_scope("mlp"):
        h = rms_norm(x_RxTxD, layer["mlp_norm"], cfg.rms_norm_eps)
        return x_RxTxD + gated(dense(h, layer["gate"]), dense(h, layer["up"]), layer["down"])


@functools.partial(jax.checkpoint, prevent_cse=False)
def gated(gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """``(silu(gate) * up) @ down``. The backward pass keeps the two products and computes what is elementwise again: keeping
    all five wide arrays costs more, in time as in memory, than the exponential."""
    return dense(jax.nn.silu(gate) * up, down)


def embed(params: Params, tokens_RxT: jax.Array) -> jax.Array:
    # Whole rows of the table first, as every matrix is gathered over fsdp before its use: looked up in slices of their width, the
    # rows come out sharded by width and have to be replicated before they can be sharded by row.
    return constrain(params["embed"], "vocab", None)[tokens_RxT]


def head_weight(params: Params, cfg: ModelConfig) -> jax.Array:
    """[V, D]: the embedding itself where tied."""
    return params["embed"] if cfg.tie_word_embeddings else params["lm_head"]


def remat(fn: Any, cfg: ModelConfig) -> Any:
    """Wraps a layer of the scan by the named rematerialisation policy."""
    if cfg.remat == "none":
        return fn
    policy = None if cfg.remat == "full" else getattr(jax.checkpoint_policies, cfg.remat)
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)  # right only inside a scan, where this always is


def forward(params: Params, cfg: ModelConfig, tokens_RxT: jax.Array, *, keep_keys: bool = False) -> Output:
    """The whole sequence at once, causal.

    Rows are right-padded. A causal mask alone then keeps padding out of every real position: query i sees keys <= i,
    all of them real where i is. What stands at padded positions is finite and must be masked by the caller, by length.

    Args:
      params: tree of :func:`jprm.model.spec.param_specs`, any float dtype.
      cfg: the model's shape (static).
      tokens_RxT: i32[R, T].
      keep_keys: also return every layer's keys and values (prefill).

    Returns:
      :class:`Output`.
    """
    params = cast_params(params, cfg)
    R, T = tokens_RxT.shape
    position_T = jnp.arange(T)
    rope = rope_tables(position_T[None], cfg)
    causal = position_T[None, :, None] >= position_T[None, None, :]

    def layer_fn(x, layer):
        kept = []

        def attend(q, k, v):
            kept.append((k, v))
            return attention(q, k, v, causal)

        x = constrain(block(layer, cfg, x, rope, attend), "rows", None, None)
        return x, kept[0] if keep_keys else None

    x_RxTxD = constrain(embed(params, tokens_RxT), "rows", None, None)
    x_RxTxD, kept = jax.lax.scan(remat(layer_fn, cfg), x_RxTxD, params["layers"], unroll=cfg.unroll)
    hidden = rms_norm(x_RxTxD, params["final_norm"], cfg.rms_norm_eps)
    return Output(hidden, *kept) if keep_keys else Output(hidden)


def logits(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """f32[..., V]. For the few positions that decoding needs; training goes through :func:`jprm.model.logps.token_logps`."""
    head = head_weight(params, cfg).astype(cfg.dtype)
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
