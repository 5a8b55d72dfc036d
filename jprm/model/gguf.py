"""A ``.gguf`` file as a model: its config in Hugging Face's terms, its tensors dequantised on demand.

Needs the extra ``gguf``. The tokenizer in the file is :func:`jprm.data.gguf_file.gguf_tokenizer`.
"""

import pathlib
from typing import Any

import numpy as np

from jprm.data.gguf_file import open_gguf
from jprm.errors import UserError
from jprm.model.hf_config import ARCHITECTURES, config_from_hf
from jprm.model.hf_load import hf_tensors

# llama.cpp rotates neighbouring pairs, so its converter interleaves the rows of q and k of Llama models. Qwen2 keeps the halves.
_INTERLEAVED = {"llama": ("self_attn.q_proj.weight", "self_attn.k_proj.weight")}


def gguf_hf_config(path: str | pathlib.Path) -> dict[str, Any]:
    """What ``config.json`` would say about the model in a ``.gguf`` file.

    Raises:
      UserError: an unreadable file, an architecture that is neither llama nor qwen2, or one of its settings (scaled or
        partial rotary embedding, experts) that jprm does not compute.
    """
    reader = open_gguf(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {t.name for t in reader.tensors}
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        raise UserError(
            f"general.architecture = {family!r}",
            expected=f"one of {sorted(ARCHITECTURES)}",
            where=str(path),
            fix="Use a checkpoint of a supported kind",
        )

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{family}.{key}", default)

    head_dim = get("attention.key_length") or get("embedding_length", 0) // max(get("attention.head_count") or 1, 1)
    scaling = get("rope.scaling.type", "none")
    unsupported = {
        f"{family}.rope.scaling.type": (scaling, scaling == "none"),
        "rope_freqs.weight": ("present (scaled rotary frequencies)", "rope_freqs.weight" not in tensors),
        f"{family}.rope.dimension_count": (get("rope.dimension_count"), get("rope.dimension_count", head_dim) == head_dim),
        f"{family}.attention.value_length": (get("attention.value_length"), get("attention.value_length", head_dim) == head_dim),
        f"{family}.expert_count": (get("expert_count"), not get("expert_count")),
        f"{family}.attention.sliding_window": (get("attention.sliding_window"), not get("attention.sliding_window")),
    }
    for key, (value, fine) in unsupported.items():
        if not fine:
            raise UserError(
                f"{key} = {value}",
                expected="a plain decoder: unscaled rotary embedding of whole heads, one head width, dense MLP, no window",
                where=str(path),
                fix="Use a checkpoint of a supported kind",
            )
    embedding = next((t for t in reader.tensors if t.name == "token_embd.weight"), None)
    ids = {
        f"{role}_token_id": fields[key]
        for role, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in fields
    }
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        # Rows of the embedding, not tokens: the padding rows belong to the model.
        "vocab_size": int(embedding.shape[-1]) if embedding is not None else get("vocab_size"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "rope_theta": get("rope.freq_base", 10000.0),
        # Stored in fp32: 1e-5 reads 9.999999747e-06. The shortest decimal that rounds to the same fp32 is what was meant.
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon", 1e-6)))),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        **ids,
    }


class GGUFWeights:
    """Tensors of a ``.gguf`` file under their Hugging Face names (those without one keep their own and are refused later).

    Raises:
      UserError: as :func:`gguf_hf_config`, or a tensor that occurs twice or whose quantisation the package cannot undo.
    """

    def __init__(self, path: str | pathlib.Path):
        import gguf

        cfg = config_from_hf(gguf_hf_config(path), where=str(path))
        self.path, self._head_dim = pathlib.Path(path), cfg.head_dim
        self._interleaved = _INTERLEAVED.get(cfg.family, ())
        self._dequantize = gguf.dequantize
        architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == cfg.family)
        theirs = gguf.get_tensor_name_map(architecture, cfg.num_layers)
        ours = {
            theirs.get_name(name, try_suffixes=(".weight", ".bias")): name
            for name, *_ in hf_tensors(cfg.replace(tie_word_embeddings=False))
        }
        self._tensors: dict[str, Any] = {}
        for tensor in open_gguf(path).tensors:
            name = ours.get(tensor.name, tensor.name)
            if name in self._tensors:
                raise UserError(
                    f"{tensor.name} twice", expected="every tensor once", where=str(path), fix="Copy or download the file again"
                )
            self._tensors[name] = tensor
            try:
                self._dequantize(tensor.data[:1], tensor.tensor_type)
            except NotImplementedError as e:
                raise UserError(
                    f"{tensor.name} of type {tensor.tensor_type.name}",
                    expected="a quantisation that the package gguf can undo",
                    where=str(path),
                    fix="Use another quantisation of this model, or its safetensors",
                ) from e
        self.shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in self._tensors.items()}

    def origin(self, name: str) -> str:
        return str(self.path)

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        tensor, rows = self._tensors[name], box[0]
        if not name.endswith(self._interleaved or ("\0",)):
            return self._dequantize(tensor.data[rows], tensor.tensor_type)[(slice(None), *box[1:])]
        half = self._head_dim // 2
        start = rows.start // self._head_dim * self._head_dim  # whole heads: the rows of one are shuffled among themselves
        stop = -(-rows.stop // self._head_dim) * self._head_dim
        heads = self._dequantize(tensor.data[start:stop], tensor.tensor_type)
        halves = heads.reshape(-1, half, 2, heads.shape[1]).swapaxes(1, 2).reshape(heads.shape)
        return halves[rows.start - start : rows.stop - start, box[1]]
