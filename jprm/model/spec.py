"""Every parameter, declared once: shape, logical axes, initialiser, Hugging Face name.

Initial values, abstract shapes, shardings, the weight map in both directions, counts and FLOPs are all derived from
this tree. Layers are stacked on axis 0; a ``{layer}`` in ``hf_name`` says so.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jprm.model.config import ModelConfig
from jprm.sharding.rules import sharding

Params = dict[str, Any]  # nested dict of arrays


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
      shape: of our array, the stacked layer axis included.
      axes: logical name of each dimension, see :mod:`jprm.sharding.rules`.
      init: ``"normal"`` (std ``scale``), ``"ones"`` or ``"zeros"``.
      hf_name: tensor name in a Hugging Face checkpoint; ``{layer}`` marks a stacked parameter.
      hf_shape: shape of one tensor there (torch's ``[out, in]``).
      transpose: permutation applied to ours (one layer, heads merged) to get theirs; they are 2-D matrices or vectors.
      scale: standard deviation of a normal initialiser.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf_name: str
    hf_shape: tuple[int, ...]
    init: str = "normal"
    transpose: bool = False
    scale: float = 0.02

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.hf_name

    def from_hf(self, tensor: Any) -> Any:
        """One Hugging Face tensor (any array with ``.T``/``.reshape``) -> our layout, without the layer axis."""
        return (tensor.T if self.transpose else tensor).reshape(self.shape[1:] if self.stacked else self.shape)

    def to_hf(self, array: Any) -> Any:
        """Our array (one layer of it where stacked) -> the Hugging Face layout."""
        if not self.transpose:
            return array.reshape(self.hf_shape)
        return array.reshape(self.hf_shape[::-1]).T


def param_specs(cfg: ModelConfig) -> dict[str, Any]:
    """The tree of :class:`ParamSpec` of a model. Matmuls contract ours from the left: ``x_RxTxD @ w_DxF``."""
    L, D, F, V = cfg.num_layers, cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size
    H, K, Dh = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    out_scale = 0.02 / math.sqrt(2 * L)  # residual branches start small (GPT-2), so depth does not set the loss at step 0

    def matrix(shape, axes, name, hf_shape, scale=0.02):
        return ParamSpec(
            (L, *shape), ("layers", *axes), f"model.layers.{{layer}}.{name}.weight", hf_shape, transpose=True, scale=scale
        )

    def vector(shape, axes, name, init):
        return ParamSpec((L, *shape), ("layers", *axes), f"model.layers.{{layer}}.{name}", (math.prod(shape),), init=init)

    layers = {
        "attn_norm": vector((D,), ("norm",), "input_layernorm.weight", "ones"),
        "q": matrix((D, H, Dh), ("embed", "heads", "head_dim"), "self_attn.q_proj", (H * Dh, D)),
        "k": matrix((D, K, Dh), ("embed", "kv_heads", "head_dim"), "self_attn.k_proj", (K * Dh, D)),
        "v": matrix((D, K, Dh), ("embed", "kv_heads", "head_dim"), "self_attn.v_proj", (K * Dh, D)),
        "o": matrix((H, Dh, D), ("heads", "head_dim", "embed"), "self_attn.o_proj", (D, H * Dh), out_scale),
        "mlp_norm": vector((D,), ("norm",), "post_attention_layernorm.weight", "ones"),
        "gate": matrix((D, F), ("embed", "ffn"), "mlp.gate_proj", (F, D)),
        "up": matrix((D, F), ("embed", "ffn"), "mlp.up_proj", (F, D)),
        "down": matrix((F, D), ("ffn", "embed"), "mlp.down_proj", (D, F), out_scale),
    }
    if cfg.qkv_bias:
        for p, n, axis in (("q", H, "heads"), ("k", K, "kv_heads"), ("v", K, "kv_heads")):
            layers[f"{p}_bias"] = vector((n, Dh), (axis, "head_dim"), f"self_attn.{p}_proj.bias", "zeros")
    tree = {
        "embed": ParamSpec((V, D), ("vocab", "embed"), "model.embed_tokens.weight", (V, D)),
        "layers": layers,
        "final_norm": ParamSpec((D,), ("norm",), "model.norm.weight", (D,), init="ones"),
    }
    if not cfg.tie_word_embeddings:
        tree["lm_head"] = ParamSpec((V, D), ("vocab", "embed"), "lm_head.weight", (V, D))
    return tree


def map_specs(fn, cfg: ModelConfig) -> Any:
    """Maps ``fn(spec)`` over the tree of specs."""
    return jax.tree.map(fn, param_specs(cfg), is_leaf=lambda x: isinstance(x, ParamSpec))


def named_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """``{"layers/q": spec, …}``: parameter names as rules, errors and reports spell them."""
    flat, _ = jax.tree_util.tree_flatten_with_path(param_specs(cfg), is_leaf=lambda x: isinstance(x, ParamSpec))
    return {"/".join(k.key for k in path): s for path, s in flat}


def init_params(cfg: ModelConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Fresh parameters. Jit it with ``out_shardings=param_shardings(…)`` so that no device ever holds them all."""
    names = list(named_specs(cfg))
    keys = dict(zip(names, jax.random.split(key, len(names))))

    def one(path, s: ParamSpec):
        if s.init == "normal":
            return (s.scale * jax.random.normal(keys["/".join(k.key for k in path)], s.shape, jnp.float32)).astype(dtype)
        return jnp.full(s.shape, 1.0 if s.init == "ones" else 0.0, dtype)

    return jax.tree_util.tree_map_with_path(one, param_specs(cfg), is_leaf=lambda x: isinstance(x, ParamSpec))


def param_shardings(cfg: ModelConfig, mesh: Mesh) -> Any:
    return map_specs(lambda s: sharding(mesh, s.axes), cfg)


def abstract_params(cfg: ModelConfig, mesh: Mesh | None = None, dtype: str = "float32") -> Any:
    """``ShapeDtypeStruct`` of every parameter, with shardings where a mesh is given; allocates nothing."""
    return map_specs(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype), sharding=None if mesh is None else sharding(mesh, s.axes)), cfg
    )


def count_params(cfg: ModelConfig) -> int:
    return sum(math.prod(s.shape) for s in named_specs(cfg).values())


def forward_flops(cfg: ModelConfig, rows: int, length: int, head_tokens: int | None = None) -> int:
    """Model FLOPs of one forward pass over ``rows x length`` tokens (2 per multiply-add, causal attention counted by half).

    ``head_tokens``: tokens per row that reach the vocabulary (default: all). A backward pass costs twice as much.
    """
    matmul = sum(math.prod(s.shape) for n, s in named_specs(cfg).items() if s.stacked and len(s.shape) > 2 and "bias" not in n)
    attention = cfg.num_layers * cfg.num_heads * cfg.head_dim * 2 * length * length  # QK^T and AV, half of 2 x 2 T^2
    head = cfg.vocab_size * cfg.hidden_size * (length if head_tokens is None else head_tokens)
    return rows * (2 * matmul * length + attention + 2 * head)
