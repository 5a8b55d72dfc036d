"""Two real processes: each loads its own shards, both gather, one writes."""

import socket
import subprocess
import sys

import jax
import pytest

from jprm.model.config import ModelConfig
from jprm.model.hf_export import export_model
from jprm.model.hf_load import SINGLE
from jprm.model.spec import init_params
from jprm.tasks.arithmetic import make_tokenizer
from tests.conftest import ROOT

CFG = ModelConfig(
    family="qwen2",
    qkv_bias=True,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
)

WORKER = """
import pathlib, sys
import jax
port, rank, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from jprm.errors import UserError
from jprm.model.hf_config import load_config
from jprm.model.hf_export import export_model
from jprm.model.hf_load import load_params
from jprm.sharding.mesh import make_mesh
from jprm.tasks.arithmetic import make_tokenizer
cfg = load_config(folder / "in")
mesh = make_mesh({"data": 1, "fsdp": -1, "tensor": 2})
params = load_params(folder / "in", cfg, mesh)
assert not params["embed"].is_fully_addressable
export_model(params, cfg, folder / "out", make_tokenizer(), stop_ids=[2], dtype="float32")
try:
    export_model(params, cfg, folder / "out", make_tokenizer(), stop_ids=[2])
except UserError as e:
    print("refused", e)
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    export_model(init_params(CFG, jax.random.key(0)), CFG, tmp_path / "in", make_tokenizer(), stop_ids=[2], dtype="float32")
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-c", WORKER, str(port)]
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)
    workers = [subprocess.Popen([*command, str(rank), str(tmp_path)], **pipes) for rank in range(2)]
    try:
        outputs = [w.communicate(timeout=120)[0] for w in workers]
    finally:
        for w in workers:
            w.kill()
    assert [w.returncode for w in workers] == [0, 0], outputs
    assert all("refused" in o for o in outputs)  # process 0's finding reaches the other, or it would wait for ever
    assert (tmp_path / "out" / SINGLE).read_bytes() == (tmp_path / "in" / SINGLE).read_bytes()
