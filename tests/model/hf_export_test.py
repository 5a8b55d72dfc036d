"""The exported directory: what is in it, and that it is whole or not there. Loading it in transformers is in parity_test."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from jprm.data.tokenizer import load_tokenizer
from jprm.errors import UserError
from jprm.model import hf_export
from jprm.model.config import ModelConfig
from jprm.model.hf_config import load_config
from jprm.model.hf_export import export_model
from jprm.model.hf_load import INDEX, SINGLE, open_weights
from jprm.model.spec import init_params, param_shardings
from jprm.sharding.mesh import make_mesh
from tests.conftest import data_path

TIED = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
UNTIED = TIED.replace(family="qwen2", qkv_bias=True, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tokenizer():
    from jprm.tasks.arithmetic import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="module")
def params():
    return {cfg: init_params(cfg, jax.random.key(0)) for cfg in (TIED, UNTIED)}


def values(path):
    weights = open_weights(path)
    return {n: weights.read(n, tuple(slice(0, k) for k in s)) for n, s in weights.shapes.items()}


def test_files_of_one_shard(params, tokenizer, tmp_path):
    source = {"initializer_range": 0.03, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "eos_token_id": 9}
    out = export_model(
        params[TIED],
        TIED,
        tmp_path / "out",
        tokenizer,
        stop_ids=(7, 2),
        source_config=source,
        extra={"beta": 0.1, "step_rule": ";"},
    )
    assert {p.name for p in tmp_path.iterdir()} == {"out"}  # nothing of the temporary directory is left
    names = {p.name for p in out.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        SINGLE,
        "tokenizer.json",
        "tokenizer_config.json",
        "jprm.json",
        "README.md",
    } <= names
    assert INDEX not in names
    with safe_open(out / SINGLE, "numpy") as f:
        assert f.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in f.keys() and {f.get_slice(n).get_dtype() for n in f.keys()} == {"BF16"}
    config, generation = (json.loads((out / n).read_text()) for n in ("config.json", "generation_config.json"))
    assert (
        config["torch_dtype"] == "bfloat16"
        and config["initializer_range"] == 0.03
        and config["eos_token_id"] == tokenizer.eos_token_id
    )
    assert generation["eos_token_id"] == [2, 7] and generation["pad_token_id"] == tokenizer.pad_token_id
    assert json.loads((out / "jprm.json").read_text()) == {"beta": 0.1, "step_rule": ";"}
    # The names that both generations of transformers know.
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert load_tokenizer(out).encode("12+3=") == tokenizer.encode("12+3=")
    assert load_config(out) == TIED


def test_shards_and_index(params, tokenizer, tmp_path):
    one = export_model(params[UNTIED], UNTIED, tmp_path / "one", tokenizer, stop_ids=[2], dtype="float32")
    many = export_model(
        params[UNTIED], UNTIED, tmp_path / "many", tokenizer, stop_ids=[2], dtype="float32", max_shard_bytes=12_000
    )
    index = json.loads((many / INDEX).read_text())
    files = sorted(p.name for p in many.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files and not (many / SINGLE).exists()
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert "lm_head.weight" in index["weight_map"] and index["metadata"]["total_size"] == sum(
        x.nbytes for x in values(one).values()
    )
    for file in files:
        with safe_open(many / file, "numpy") as f:
            sizes = [np.prod(f.get_slice(n).get_shape()) * 4 for n in f.keys()]
            assert len(sizes) == 1 or sum(sizes) <= 12_000
    for (a, x), (b, y) in zip(sorted(values(one).items()), sorted(values(many).items())):
        assert a == b
        np.testing.assert_array_equal(x, y)


def test_sharded_parameters_give_the_same_files(params, tokenizer, tmp_path):
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sharded = jax.device_put(params[UNTIED], param_shardings(UNTIED, mesh))
    a = export_model(params[UNTIED], UNTIED, tmp_path / "a", tokenizer, stop_ids=[2])
    b = export_model(sharded, UNTIED, tmp_path / "b", tokenizer, stop_ids=[2])
    assert (a / SINGLE).read_bytes() == (b / SINGLE).read_bytes()
    rounded = np.asarray(params[UNTIED]["embed"]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(values(a)["model.embed_tokens.weight"], rounded)


def test_one_layer_at_a_time(params, tokenizer, tmp_path, monkeypatch):
    seen = []
    real = hf_export._gather

    def spy(*args):
        for name, value in real(*args):
            seen.append(value.shape)
            yield name, value

    monkeypatch.setattr(hf_export, "_gather", spy)
    export_model(params[TIED], TIED, tmp_path / "out", tokenizer, stop_ids=[2])
    assert seen[0] == (64, 32) and len(seen) == 2 + 9 * TIED.num_layers  # tensors of one layer each, never a stack
    assert max(len(s) for s in seen) == 2


def test_tokenizer_files_are_copied_unless_changed(params, tmp_path):
    source = data_path("models/stories260k/hf")
    cfg = TIED.replace(vocab_size=512)
    tokenizer = load_tokenizer(source)
    weights = init_params(cfg, jax.random.key(0))
    same = export_model(weights, cfg, tmp_path / "same", tokenizer, stop_ids=[2])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (same / name).read_bytes() == (source / name).read_bytes()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    changed = export_model(weights, cfg, tmp_path / "changed", tokenizer, stop_ids=[2])
    assert load_tokenizer(changed).chat_template == tokenizer.chat_template


def test_refused_before_anything_is_written(params, tokenizer, tmp_path, monkeypatch):
    gather = hf_export._gather
    monkeypatch.setattr(hf_export, "_gather", lambda *args: pytest.fail("gathered before the checks"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    small = TIED.replace(vocab_size=8)
    for out, cfg, settings, part in (
        ("full", TIED, {}, "a directory that is not empty"),
        ("file", TIED, {}, "a file"),
        ("out", TIED, {"dtype": "float16"}, "float16"),
        ("out", TIED, {"stop_ids": []}, "stop ids"),
        ("out", TIED, {"stop_ids": [64]}, "stop ids"),
        ("out", small, {}, "with id"),
        ("out", TIED.replace(qkv_bias=True), {}, "qkv_bias"),
    ):
        with pytest.raises(UserError) as e:
            export_model(params[TIED], cfg, tmp_path / out, tokenizer, **({"stop_ids": [2]} | settings))
        assert part in e.value.found and e.value.expected and e.value.where and e.value.fix
    assert {p.name for p in tmp_path.rglob("*")} == {"full", "x", "file"}
    monkeypatch.setattr(hf_export, "_gather", gather)
    (tmp_path / "empty").mkdir()
    export_model(params[TIED], TIED, tmp_path / "empty", tokenizer, stop_ids=[2])  # an empty one is as good as none


def test_a_full_disk_leaves_nothing(params, tokenizer, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_export, "save_file", full)
    with pytest.raises(UserError) as e:
        export_model(params[TIED], TIED, tmp_path / "out", tokenizer, stop_ids=[2])
    assert "No space left" in e.value.found and e.value.where == str(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_killed_export_is_not_in_the_way(params, tokenizer, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / SINGLE).write_text("half")
    export_model(params[TIED], TIED, tmp_path / "out", tokenizer, stop_ids=[2])
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
