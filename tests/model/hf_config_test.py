"""config.json in both spellings, out again, and the keys that must be refused by name."""

import json

import pytest

from jprm.errors import UserError
from jprm.model.config import ModelConfig
from jprm.model.hf_config import config_from_hf, config_to_hf, load_config, read_hf_config
from tests.conftest import needs

OLD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
NEW = {k: v for k, v in OLD.items() if k not in ("rope_theta", "torch_dtype")} | {
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
QWEN = OLD | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 1,
}


def test_both_spellings_are_one_config():
    cfg = config_from_hf(OLD)
    assert cfg == config_from_hf(NEW)
    assert cfg == ModelConfig(
        family="llama",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )


def test_absent_keys():
    minimal = {
        k: OLD[k]
        for k in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    cfg = config_from_hf(minimal)
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.rope_theta, cfg.tie_word_embeddings) == (4, 8, 10000.0, False)
    assert config_from_hf(OLD | {"head_dim": 16}).head_dim == 16
    assert config_from_hf(OLD | {"head_dim": None, "rope_scaling": None}).head_dim == 8
    assert config_from_hf(QWEN).qkv_bias


@pytest.mark.parametrize(
    "change, key",
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters"),  # contradicts rope_theta
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 33}, "num_attention_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rope_theta": -1}, "rope_theta"),
        (QWEN | {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_refused_by_name(change, key):
    with pytest.raises(UserError) as e:
        config_from_hf(OLD | change, where="somewhere/config.json")
    assert e.value.where == f"somewhere/config.json: {key}" and e.value.found.startswith(key)
    assert e.value.expected and e.value.fix


def test_a_window_that_no_layer_uses_is_fine():
    assert config_from_hf(QWEN | {"use_sliding_window": True, "max_window_layers": 2}).num_layers == 2


def test_out_in_the_old_spelling_with_the_source_kept():
    source = NEW | {
        "initializer_range": 0.03,
        "auto_map": {"AutoConfig": "x.y"},
        "transformers_version": "5.24.0",
        "layer_types": ["full_attention"] * 2,
    }
    out = config_to_hf(config_from_hf(source), source=source, dtype="float32")
    assert out["rope_theta"] == 5e5 and out["torch_dtype"] == "float32" and out["initializer_range"] == 0.03
    assert not {"rope_parameters", "dtype", "auto_map", "layer_types", "transformers_version"} & set(out)
    assert config_from_hf(out) == config_from_hf(source)


@pytest.mark.parametrize("raw", [OLD, NEW, QWEN, OLD | {"head_dim": 16}], ids=["old", "new", "qwen2", "head_dim"])
def test_transformers_reads_ours_as_it_reads_the_source(raw, tmp_path):
    transformers = needs("transformers")
    for name, value in (("a", raw), ("b", config_to_hf(config_from_hf(raw), source=raw))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(value))
    a, b = (transformers.AutoConfig.from_pretrained(tmp_path / n).to_dict() for n in "ab")
    a.pop("_name_or_path"), b.pop("_name_or_path")
    assert (a.pop("head_dim", None) or 8) == b.pop("head_dim")
    assert a == b


def test_a_model_without_an_architecture_is_refused():
    for cfg in (ModelConfig(qkv_bias=True), ModelConfig(family="qwen2"), ModelConfig(pattern=("local", "global"))):
        with pytest.raises(UserError, match="config.model.family"):
            config_to_hf(cfg)


def test_a_wrong_path(tmp_path):
    (tmp_path / "config.json").write_text("{")
    for path, part in ((tmp_path / "absent", "no such directory"), (tmp_path / "config.json", "a file"), (tmp_path, "not JSON")):
        with pytest.raises(UserError, match=part):
            read_hf_config(path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="JSON list"):
        load_config(tmp_path)
