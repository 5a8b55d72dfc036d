"""Hugging Face's ``config.json`` <-> :class:`~jprm.model.config.ModelConfig`.

Both spellings are read: ``rope_theta`` / ``rope_scaling`` / ``torch_dtype`` (transformers 4) and ``rope_parameters`` /
``dtype`` (transformers 5). The old one is written, because both generations read it. A key that changes what the model
computes and that jprm does not implement is refused by name: a model that loads and computes something else is the
worst outcome.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from jprm.data.files import read_json
from jprm.errors import UserError
from jprm.model.config import ModelConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

# Keys of a source's config that an export writes anew, spells the old way, or must not repeat because they describe
# the files that were there (how they were quantised, where their code was), not the model.
_REWRITTEN = (
    "rope_parameters",
    "rope_scaling",
    "dtype",
    "layer_types",
    "quantization_config",
    "auto_map",
    "_name_or_path",
    "transformers_version",
)


def read_hf_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The raw ``config.json`` of a model directory, or what it would say for a ``.gguf`` file.

    Raises:
      UserError: no such model, or not JSON, or a GGUF of an unknown architecture.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        from jprm.model.gguf import gguf_hf_config  # needs the extra `gguf`

        return gguf_hf_config(path)
    if not path.is_dir():
        raise UserError(
            "no such directory" if not path.exists() else "a file",
            expected="a directory in Hugging Face form, or a .gguf file",
            where=str(path),
            fix="Set config.model.path to a local model; jprm downloads nothing",
        )
    return read_json(path / "config.json")


def load_config(path: str | pathlib.Path) -> ModelConfig:
    """The model's shape from a directory in Hugging Face form or a ``.gguf`` file. Numerics keep their defaults."""
    path = pathlib.Path(path)
    return config_from_hf(read_hf_config(path), where=str(path if path.suffix == ".gguf" else path / "config.json"))


def config_from_hf(raw: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """A parsed ``config.json`` as a :class:`ModelConfig`.

    Args:
      raw: the parsed file.
      where: its path, for errors.

    Raises:
      UserError: a required key is missing or of the wrong type, or a key asks for something jprm does not compute
        (another architecture, scaled or partial rotary embedding, sliding window in use, other biases or activation,
        quantised weights). The key is named.

    Example:
      >>> config_from_hf({"model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16,
      ...                 "num_hidden_layers": 1, "num_attention_heads": 2}).head_dim
      4
    """

    def refuse(key, expected, fix="Use a checkpoint of a supported kind"):
        raise UserError(f"{key} = {raw.get(key)!r}", expected=expected, where=f"{where}: {key}", fix=fix)

    def number(key, kind, default=None):
        value = raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0 or kind(value) != value:
            refuse(key, f"a positive {'whole ' if kind is int else ''}number", "Use the config.json that belongs to the weights")
        return kind(value)

    family = raw.get("model_type")
    if family not in ARCHITECTURES:
        refuse("model_type", f"one of {sorted(ARCHITECTURES)}")
    architectures = raw.get("architectures") or [ARCHITECTURES[family]]
    if architectures != [ARCHITECTURES[family]]:
        refuse("architectures", f"[{ARCHITECTURES[family]!r}], the language model of model_type {family!r}")
    if raw.get("quantization_config"):
        refuse(
            "quantization_config",
            "unquantised weights (fp32, bf16 or fp16)",
            "Use the checkpoint that was not quantised, or a .gguf file",
        )
    if (act := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        refuse("hidden_act", f"'silu' (the gated MLP's activation; {act!r} is not implemented)")
    if family == "llama" and raw.get("attention_bias"):
        refuse("attention_bias", "false: Llama without biases (Qwen2 has them on q, k and v)")
    if raw.get("mlp_bias"):
        refuse("mlp_bias", "false: an MLP without biases")

    layers, heads = number("num_hidden_layers", int), number("num_attention_heads", int)
    _check_window(raw, family, layers, refuse)
    hidden = number("hidden_size", int)
    if raw.get("head_dim") is None and hidden % heads:
        refuse(
            "num_attention_heads", f"a divisor of hidden_size = {hidden} where head_dim is absent", "Add head_dim to the config"
        )
    return ModelConfig(
        family=family,
        vocab_size=number("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", int, heads),
        head_dim=number("head_dim", int, hidden // heads),
        rope_theta=_rope_theta(raw, number, refuse),
        rms_norm_eps=number("rms_norm_eps", float, 1e-6),
        # Absent means untied in both families, whatever the base class of transformers defaults to.
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        max_position_embeddings=number("max_position_embeddings", int, 2048 if family == "llama" else 32768),
    )


def _rope_theta(raw: Mapping[str, Any], number: Any, refuse: Any) -> float:
    theta = {}
    for key in ("rope_parameters", "rope_scaling"):  # transformers 5 accepts either name for the new form
        rope = raw.get(key) or {}
        if not isinstance(rope, Mapping) or (rope and not {"rope_type", "type", "rope_theta"} & set(rope)):
            refuse(key, "null or {'rope_type': 'default', 'rope_theta': …}")  # one table per layer kind, for instance
        if rope.get("rope_type", rope.get("type", "default")) not in (None, "default"):
            refuse(key, "rope_type 'default' (scaled rotary frequencies are not implemented)")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            refuse(key, "partial_rotary_factor 1.0")
        if rope.get("rope_theta") is not None:
            theta[key] = rope["rope_theta"]
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        refuse("partial_rotary_factor", "1.0")
    if raw.get("rope_theta") is not None:
        theta["rope_theta"] = number("rope_theta", float)
    if len(set(theta.values())) > 1:
        refuse(next(iter(theta)), f"one base of the rotary frequencies, not {theta}", "Remove the wrong one")
    value = next(iter(theta.values()), 10000.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        refuse(next(iter(theta)), "a positive rope_theta", "Use the config.json that belongs to the weights")
    return float(value)


def _check_window(raw: Mapping[str, Any], family: str, layers: int, refuse: Any) -> None:
    """Refuses a sliding window that is in use. Most Qwen2 configs name one and switch it off."""
    kinds = raw.get("layer_types")
    if kinds:
        if set(kinds) != {"full_attention"}:
            refuse("layer_types", "'full_attention' in every layer (a sliding window is not implemented)")
    elif family == "qwen2" and raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        if raw.get("max_window_layers", 28) < layers:
            refuse("use_sliding_window", "false (a sliding window is not implemented)")


def config_to_hf(cfg: ModelConfig, *, source: Mapping[str, Any] | None = None, dtype: str = "bfloat16") -> dict[str, Any]:
    """What ``config.json`` says about a model, in the spelling that transformers 4 and 5 both read.

    Args:
      cfg: the model's shape.
      source: raw config of the checkpoint it came from; keys that jprm does not know (``initializer_range``,
        ``bos_token_id``, …) are kept.
      dtype: of the exported tensors.

    Raises:
      UserError: no Hugging Face architecture computes this model.
    """
    if cfg.family not in ARCHITECTURES or cfg.qkv_bias != (cfg.family == "qwen2") or set(cfg.pattern) != {"global"}:
        raise UserError(
            f"family {cfg.family!r} with qkv_bias={cfg.qkv_bias}, pattern={cfg.pattern}",
            expected="llama without or qwen2 with q, k, v biases, every layer global",
            where="config.model.family",
            fix="Train a model that transformers can load, or keep the checkpoint",
        )
    kept = {k: v for k, v in (source or {}).items() if k not in _REWRITTEN}
    return kept | {
        "architectures": [ARCHITECTURES[cfg.family]],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_theta": cfg.rope_theta,
        "max_position_embeddings": cfg.max_position_embeddings,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "torch_dtype": dtype,
    }
