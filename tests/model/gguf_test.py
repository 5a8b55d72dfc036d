"""GGUF: config, dequantised tensors and their row order, tokenizer. Files are made here; the real one is in parity_test."""

import numpy as np
import pytest

from jprm.data.gguf_file import gguf_stop_ids, gguf_tokenizer, open_gguf
from jprm.errors import UserError
from jprm.model.config import ModelConfig
from jprm.model.gguf import GGUFWeights, gguf_hf_config
from jprm.model.hf_config import load_config
from jprm.model.hf_load import hf_tensors, load_params
from jprm.sharding.mesh import make_mesh
from tests.conftest import data_path, needs
from tests.model.hf_load_test import flat, reference

gguf = needs("gguf")

LLAMA = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    max_position_embeddings=128,
)
QWEN = LLAMA.replace(family="qwen2", qkv_bias=True, tie_word_embeddings=False, head_dim=32)


def tensors_of(cfg):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(spec.hf_shape).astype(np.float32) for name, _, _, spec in hf_tensors(cfg)}


def interleave(w, heads):
    """What llama.cpp's converter does to q and k of a Llama (halves -> neighbouring pairs)."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def write(path, cfg, tensors, quantise=lambda name, x: None, **settings):
    arch = cfg.family
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": cfg.num_layers,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": cfg.intermediate_size,
        "attention.head_count": cfg.num_heads,
        "attention.head_count_kv": cfg.num_kv_heads,
        "context_length": cfg.max_position_embeddings,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
    }
    for key, value in (numbers | {k: v for k, v in settings.items() if isinstance(v, int)}).items():
        writer.add_uint32(f"{arch}.{key}", value)
    for key, value in settings.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", cfg.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", cfg.rope_theta)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), cfg.num_layers)
    for name, x in tensors.items():
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            x = interleave(x, cfg.num_heads if "q_proj" in name else cfg.num_kv_heads)
        kind = quantise(name, x)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        if kind is None:
            writer.add_tensor(theirs, x)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("cfg", [LLAMA, QWEN], ids=["llama", "qwen2"])
def test_exact_tensors(cfg, tmp_path):
    tensors = tensors_of(cfg)
    path = write(tmp_path / "m.gguf", cfg, tensors)
    assert load_config(path) == cfg
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})  # windows that cut between heads and within the width
    for params in (flat(load_params(path, cfg)), flat(load_params(path, cfg, mesh))):
        for name, wanted in reference(cfg, tensors).items():
            np.testing.assert_array_equal(params[name], wanted, err_msg=name)


def test_quantised_rows(tmp_path):
    """Any rows of a quantised matrix, also such as begin and end within a head."""
    tensors = tensors_of(LLAMA)
    kinds = gguf.GGMLQuantizationType
    path = write(
        tmp_path / "m.gguf", LLAMA, tensors, lambda n, x: None if x.ndim == 1 else kinds.F16 if "mlp.up" in n else kinds.Q8_0
    )
    weights = GGUFWeights(path)
    for name in (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ):
        for box in ((slice(3, 21), slice(5, 40)), (slice(0, 32), slice(0, 64)), (slice(17, 18), slice(0, 1))):
            np.testing.assert_allclose(weights.read(name, box), tensors[name][box], atol=0.02)


@pytest.mark.parametrize(
    "settings, part",
    [
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"expert_count": 8}, "expert_count"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"attention.sliding_window": 64}, "sliding_window"),
    ],
)
def test_refused_settings(settings, part, tmp_path):
    with pytest.raises(UserError, match=part):
        gguf_hf_config(write(tmp_path / "m.gguf", LLAMA, tensors_of(LLAMA), **settings))


def test_refused_files(tmp_path):
    tensors = tensors_of(LLAMA)
    path = write(tmp_path / "m.gguf", LLAMA, tensors | {"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(UserError, match="rope_freqs.weight"):
        load_config(path)
    path = write(tmp_path / "extra.gguf", LLAMA, tensors | {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(UserError, match="blk.0.attn_q_norm.weight"):
        load_params(path, LLAMA)
    content = write(tmp_path / "whole.gguf", LLAMA, tensors).read_bytes()
    for change in (
        content[:-100],
        content[:300],
        b"GGUF",
        b"not a gguf at all" * 9,
        b"version https://git-lfs.github.com/spec/v1\n",
    ):
        (tmp_path / "bad.gguf").write_bytes(change)
        with pytest.raises(UserError, match="bad.gguf"):
            load_params(tmp_path / "bad.gguf", LLAMA)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma")
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with pytest.raises(UserError, match="gemma"):
        load_config(tmp_path / "other.gguf")


def test_without_the_extra(tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'jprm\[gguf\]'"):
        open_gguf(tmp_path / "m.gguf")


TEXTS = [
    "Hello world",
    "I'll pay 12345 dollars, you're 7.",
    "  two  spaces\n\n\tand a tab ",
    "naïve café — 数学 ½ ²",
    "a\r\nb\r\n\r\nc",
    "x=3*(y+12)//4;#ok",
    "IT'S DON'T",
    "\n",
    "   ",
    "cafe\u0301",
    "<|im_start|>user\nHi<|im_end|>\n",
]


def fields_of(source, pre):
    """GGUF metadata of an existing byte-level BPE, as llama.cpp's converter writes it."""
    import json

    model = json.loads(source.backend_tokenizer.to_str())
    tokens = {i: t for t, i in model["model"]["vocab"].items()} | {a["id"]: a["content"] for a in model["added_tokens"]}
    special = {a["id"]: 3 if a["special"] else 4 for a in model["added_tokens"]}
    assert sorted(tokens) == list(range(len(tokens)))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens[i] for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [special.get(i, 1) for i in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": source.eos_token_id,
        "tokenizer.ggml.padding_token_id": source.pad_token_id,
        "tokenizer.chat_template": source.chat_template,
        "general.architecture": "qwen2",
        "qwen2.context_length": 1024,
    }


@pytest.fixture(scope="module")
def qwen():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(data_path("tokenizers/qwen3"))


@pytest.mark.slow
def test_qwen2_and_llama_tokenizers(qwen):
    fields = fields_of(qwen, "qwen2")
    ours = gguf_tokenizer("m.gguf", fields)
    for text in TEXTS:
        assert ours.encode(text) == qwen.encode(text), text
        assert ours.decode(ours.encode(text)) == qwen.decode(qwen.encode(text))
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    assert ours.apply_chat_template(messages, tokenize=False) == qwen.apply_chat_template(messages, tokenize=False)
    assert (ours.eos_token_id, ours.pad_token_id, len(ours)) == (qwen.eos_token_id, qwen.pad_token_id, len(qwen))

    # The llama-bpe rule differs in three ways: up to three digits at once, no unicode normalisation, bos in front.
    llama = gguf_tokenizer("m.gguf", fields | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 151643})
    words = [t for t, _ in llama.backend_tokenizer.pre_tokenizer.pre_tokenize_str("pay 12345 now, you're\n\nok")]
    assert words == ["pay", "Ġ", "123", "45", "Ġnow", ",", "Ġyou", "'re", "ĊĊ", "ok"]
    assert llama.encode("Hi")[0] == 151643 and llama.encode("Hi", add_special_tokens=False) == qwen.encode("Hi")
    assert llama.encode("cafe\u0301", add_special_tokens=False) != qwen.encode("cafe\u0301")


@pytest.mark.parametrize("key, value", [("tokenizer.ggml.model", "llama"), ("tokenizer.ggml.pre", "deepseek-llm")])
def test_other_tokenizers_are_refused(key, value):
    with pytest.raises(UserError) as e:
        gguf_tokenizer("m.gguf", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"} | {key: value})
    assert key in e.value.found and value in e.value.found and e.value.where == "m.gguf"


def test_stop_ids():
    assert gguf_stop_ids({"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 9}) == {3, 9}
