"""The decoder's shape: one frozen dataclass, static under jit."""

import dataclasses

from jprm.errors import UserError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of one decoder (Llama, Qwen2).

    The names are Hugging Face's. Hashable, so it is passed to jit as a static argument.

    Attributes:
      family: ``"llama"`` or ``"qwen2"``; decides the exported architecture and which parameters exist.
      vocab_size: V, rows of the embedding (padding rows included: exports keep them).
      hidden_size: D.
      intermediate_size: F, width of the gated MLP.
      num_layers: L.
      num_heads: H query heads.
      num_kv_heads: K key/value heads; H / K queries share one.
      head_dim: Dh.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: added to the mean square.
      tie_word_embeddings: the head is the embedding, transposed.
      qkv_bias: q, k and v have a bias (Qwen2).
      max_position_embeddings: longest sequence the checkpoint was trained for, tokens.
      pattern: repeating period of layer kinds; ``"global"`` attends to everything before.
      dtype: compute dtype of activations and matmuls; masters stay fp32.
      remat: name of a ``jax.checkpoint_policies`` member, ``"full"`` (save nothing) or ``"none"`` (no rematerialisation).
      logits_chunk: vocabulary rows per block of :func:`jprm.model.logps.token_logps`.
      unroll: layers per iteration of the layer loop in the forward pass (1 compiles fastest).
    """

    family: str = "llama"
    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 192
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    max_position_embeddings: int = 2048
    pattern: tuple[str, ...] = ("global",)
    dtype: str = "float32"
    remat: str = "none"
    logits_chunk: int = 16384
    unroll: int = 1

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}",
                expected="query heads a multiple of key/value heads",
                where="config.model.num_kv_heads",
                fix=f"Set num_kv_heads to a divisor of {self.num_heads}",
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim={self.head_dim}",
                expected="an even number (rotary pairs)",
                where="config.model.head_dim",
                fix=f"Set head_dim={self.head_dim + 1}",
            )
        if self.num_layers % len(self.pattern):
            raise UserError(
                f"num_layers={self.num_layers}",
                expected=f"a multiple of the layer pattern's period {len(self.pattern)}",
                where="config.model.num_layers",
                fix=f"Set num_layers to a multiple of {len(self.pattern)}",
            )

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)
