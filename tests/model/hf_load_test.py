"""Loading: into shardings, without a second copy, and every way in which files can be wrong."""

import json
import math
import subprocess
import sys
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jprm.errors import UserError
from jprm.model import hf_load
from jprm.model.config import ModelConfig
from jprm.model.hf_config import config_to_hf
from jprm.model.hf_load import INDEX, SINGLE, SafetensorsWeights, hf_tensors, load_params, read_window
from jprm.model.spec import named_specs, param_shardings
from jprm.sharding.mesh import make_mesh
from tests.conftest import ROOT

TIED = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
UNTIED = TIED.replace(family="qwen2", qkv_bias=True, tie_word_embeddings=False)


def tensors_of(cfg, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(spec.hf_shape).astype(dtype) for name, _, _, spec in hf_tensors(cfg)}


def write(path, cfg, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_to_hf(cfg)))
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})
    return path


def write_shards(path, cfg, tensors):
    """Two files, with an index; returns the index for a test to spoil."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_to_hf(cfg)))
    names, files = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = names[::2], names[1::2]
    for file, half in zip(files, halves):
        save_file({n: tensors[n] for n in half}, path / file)
    index = {"metadata": {}, "weight_map": {n: f for f, half in zip(files, halves) for n in half}}
    (path / INDEX).write_text(json.dumps(index))
    return index


def reference(cfg, tensors):
    """The whole-tensor way: what the windowed reads are tested against."""
    out = {}
    for ours, spec in named_specs(cfg).items():
        names = [spec.hf_name.format(layer=i) for i in range(cfg.num_layers)] if spec.stacked else [spec.hf_name]
        values = [spec.from_hf(tensors[n]) for n in names]
        out[ours] = np.stack(values) if spec.stacked else values[0]
    return out


def flat(params):
    return {"/".join(k.key for k in path): x for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}


@pytest.mark.parametrize("cfg", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_one_device(cfg, dtype, tmp_path):
    tensors = tensors_of(cfg, dtype)
    params = flat(load_params(write(tmp_path, cfg, tensors), cfg))
    wanted = reference(cfg, tensors)
    assert params.keys() == wanted.keys()
    for name, x in params.items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, wanted[name].astype(np.float32), err_msg=name)


@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 2, 2), (8, 1, 1), (1, 8, 1)])
def test_eight_devices_same_values_asked_shardings(sizes, tmp_path, monkeypatch):
    tensors = tensors_of(UNTIED)
    write_shards(tmp_path, UNTIED, tensors)
    mesh = make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes)))
    read = []
    monkeypatch.setattr(hf_load, "read_window", lambda *a: read.append(read_window(*a).size) or read_window(*a))
    params = load_params(tmp_path, UNTIED, mesh, dtype="bfloat16")
    for (name, x), placement in zip(flat(params).items(), jax.tree.leaves(param_shardings(UNTIED, mesh))):
        assert x.sharding.is_equivalent_to(placement, x.ndim), name
        np.testing.assert_array_equal(x, reference(UNTIED, tensors)[name].astype(ml_dtypes.bfloat16), err_msg=name)
    assert sum(read) == sum(math.prod(s.shape) for s in named_specs(UNTIED).values())  # every element once, replicas or not


def test_a_window_is_the_window_of_the_whole():
    tensors, rng = tensors_of(UNTIED), np.random.default_rng(1)

    class Weights:
        def read(self, name, box):
            return tensors[name][box]

    for spec in named_specs(UNTIED).values():
        name = spec.hf_name.format(layer=1)
        whole = spec.from_hf(tensors[name])
        for _ in range(20):
            bounds = [sorted(rng.choice(n + 1, 2, replace=False)) for n in whole.shape]
            window = tuple(slice(int(a), int(b)) for a, b in bounds)
            np.testing.assert_array_equal(read_window(Weights(), name, spec, window), whole[window])


def test_host_memory_is_one_shard(tmp_path, monkeypatch):
    """Buffers alive on the host at any moment: one shard, whatever the model's size (device arrays are not counted)."""
    cfg = TIED.replace(vocab_size=4096, hidden_size=256, intermediate_size=1024, num_layers=8)
    write(tmp_path, cfg, tensors_of(cfg))
    mesh = make_mesh({"data": 1, "fsdp": 4, "tensor": 2})
    put = jax.device_put
    # Device arrays that owe nothing to the host: what is traced is what loading itself holds.
    monkeypatch.setattr(jax, "device_put", lambda x, d: put(jax.numpy.zeros(x.shape, x.dtype), d))
    load_params(tmp_path, cfg, mesh)
    tracemalloc.start()
    params = load_params(tmp_path, cfg, mesh)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = max(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(params))
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    assert total > 8 * largest
    assert peak < 2 * largest, (peak, largest)  # the shard, one layer of it on its way, and small change


PEAK = """
import sys, jax
from jprm.model.hf_config import load_config
from jprm.model.hf_load import load_params
def status(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) * 1024
cfg = load_config(sys.argv[1])
jax.numpy.zeros(3).block_until_ready()
before = status("VmRSS")
params = load_params(sys.argv[1], cfg)
print(status("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_resident_memory_of_a_process(tmp_path):
    """bf16 files of 120 MB become 240 MB of fp32: mapped file pages and one parameter may come on top, a second copy may not."""
    cfg = TIED.replace(
        vocab_size=8192, hidden_size=1024, intermediate_size=2752, num_layers=4, num_heads=16, num_kv_heads=16, head_dim=64
    )
    write(tmp_path, cfg, {n: np.zeros(s.hf_shape, ml_dtypes.bfloat16) for n, _, _, s in hf_tensors(cfg)})
    out = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT)
    peak, total = map(int, out.stdout.split())
    largest = max(math.prod(s.shape) * 4 for s in named_specs(cfg).values())
    files = (tmp_path / SINGLE).stat().st_size  # mapped, counted as resident, given back when the system wants them
    assert peak < total + files + 2 * largest + 40e6 < 2 * total + files, (peak, total, files, largest)


def no_parameters(monkeypatch):
    def allocate(*args, **kwargs):
        raise AssertionError("allocated before the headers were checked")

    monkeypatch.setattr(hf_load, "map_specs", allocate)


def refused(path, cfg, monkeypatch, *parts):
    no_parameters(monkeypatch)
    with pytest.raises(UserError) as e:
        load_params(path, cfg)
    assert e.value.expected and e.value.fix
    for part in parts:
        assert part in f"{e.value.where}: {e.value.found}", e.value


def spoil_missing(t):
    del t["model.layers.1.mlp.up_proj.weight"]


def spoil_unmapped(t):
    t["model.layers.1.mlp.experts.weight"] = np.zeros(3, np.float32)


def spoil_bias(t):
    t["model.layers.0.self_attn.o_proj.bias"] = np.zeros(32, np.float32)


def spoil_layers(t):
    t["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)


def spoil_shape(t):
    t["model.embed_tokens.weight"] = np.zeros((65, 32), np.float32)


def spoil_transposed(t):
    t["model.layers.0.mlp.up_proj.weight"] = np.zeros((32, 48), np.float32)


def spoil_dtype(t):
    t["model.norm.weight"] = np.zeros(32, np.int8)


@pytest.mark.parametrize(
    "spoil, name",
    [
        (spoil_missing, "model.layers.1.mlp.up_proj.weight"),
        (spoil_unmapped, "model.layers.1.mlp.experts.weight"),
        (spoil_bias, "model.layers.0.self_attn.o_proj.bias"),
        (spoil_layers, "model.layers.2.mlp.up_proj.weight"),
        (spoil_shape, "model.embed_tokens.weight of shape [65, 32]"),
        (spoil_transposed, "model.layers.0.mlp.up_proj.weight"),
        (spoil_dtype, "model.norm.weight of type I8"),
    ],
)
def test_wrong_tensors_are_named(spoil, name, tmp_path, monkeypatch):
    tensors = tensors_of(TIED)
    spoil(tensors)
    refused(write(tmp_path, TIED, tensors), TIED, monkeypatch, name, SINGLE)


def test_known_buffers_are_ignored(tmp_path):
    tensors = tensors_of(TIED) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    load_params(write(tmp_path, TIED, tensors), TIED)


def test_heads_and_ties(tmp_path, monkeypatch):
    tensors = tensors_of(TIED)
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    assert "lm_head" not in load_params(write(tmp_path / "same", TIED, same), TIED)
    other = {n: x.copy() for n, x in same.items()}
    other["lm_head.weight"][-1, -1] += 1
    refused(write(tmp_path / "other", TIED, other), TIED, monkeypatch, "lm_head.weight, different from model.embed_tokens.weight")
    refused(
        write(tmp_path / "none", TIED, tensors),
        TIED.replace(tie_word_embeddings=False),
        monkeypatch,
        "no tensor lm_head.weight",
        "tie_word_embeddings is false",
    )


def test_wrong_files(tmp_path, monkeypatch):
    tensors = tensors_of(TIED)
    path = write(tmp_path / "whole", TIED, tensors)
    content = (path / SINGLE).read_bytes()
    for change, part in (
        (content[:-5], "truncated"),
        (content[:200], "truncated"),
        (b"", "empty"),
        (b"\xff" * 64, "damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "Git LFS pointer"),
    ):
        (path / SINGLE).write_bytes(change)
        refused(path, TIED, monkeypatch, SINGLE, part)
    (path / SINGLE).unlink()
    (path / "pytorch_model.bin").write_bytes(b"x")
    refused(path, TIED, monkeypatch, "neither", "pytorch_model.bin")


def test_wrong_indices(tmp_path, monkeypatch):
    tensors = tensors_of(TIED)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def case(name, spoil, *parts):
        path = tmp_path / name
        index = write_shards(path, TIED, tensors)
        spoil(path, index)
        (path / INDEX).write_text(json.dumps(index))
        refused(path, TIED, monkeypatch, *parts)

    def twice(path, index):
        half = {n: tensors[n] for n, f in index["weight_map"].items() if f == second}
        save_file(
            half
            | {
                "model.norm.weight": tensors["model.norm.weight"],
                "model.embed_tokens.weight": tensors["model.embed_tokens.weight"],
            },
            path / second,
        )

    case("twice", twice, second, "also in " + first)
    case("both", lambda path, index: save_file(tensors, path / SINGLE), SINGLE, INDEX)
    case("gone", lambda path, index: (path / second).unlink(), INDEX, f"no file {second}")
    case(
        "elsewhere",
        lambda path, index: index["weight_map"].update(
            {"model.norm.weight": {first: second, second: first}[index["weight_map"]["model.norm.weight"]]}
        ),
        INDEX,
        "model.norm.weight in",
    )
    case("unlisted", lambda path, index: index["weight_map"].pop("model.norm.weight"), INDEX, "model.norm.weight in")
    case("listed", lambda path, index: index["weight_map"].update({"model.x": first}), INDEX, "model.x in no file")
    case("no map", lambda path, index: index.pop("weight_map"), INDEX, "no weight_map")


def test_shards_equal_one_file(tmp_path):
    tensors = tensors_of(TIED)
    write_shards(tmp_path, TIED, tensors)
    assert SafetensorsWeights(tmp_path).shapes == {n: t.shape for n, t in tensors.items()}
    for name, x in flat(load_params(tmp_path, TIED)).items():
        np.testing.assert_array_equal(x, reference(TIED, tensors)[name])
