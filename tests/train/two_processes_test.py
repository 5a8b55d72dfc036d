"""Two real processes share one state: they save together, agree on when to stop, and one process can read what two wrote.

Seen to fail: with the sums of process 1 left out of the manifest, with SIGTERM taken by our own handler.
"""

import json
import os
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.train import checkpoint, manifest

WORKER = """
import os, sys, time
index, port, workdir = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize(f"localhost:{port}", 2, index)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jprm.train.exits import StopSignals, finish
from jprm.train.saver import Saver
from jprm.train import checkpoint

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, P("data"))
make = jax.jit(lambda step: {"w": jnp.arange(4096.).reshape(64, 64) + step, "key": jax.random.key(step)},
               out_shardings={"w": rows, "key": NamedSharding(mesh, P())})
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make(0))
step = 0
with StopSignals() as signals, Saver(workdir + "/checkpoints", keep=2) as saver:
    while not signals.stop_requested(step) and step < 2000:
        step += 1
        state = make(step)
        if step <= 3:
            saver.save(step, state, {"config": {}})
        time.sleep(0.02)
        if step == 5:
            print("ready", flush=True)
    saver.save(step, make(step), {"config": {}})
state, meta = checkpoint.restore(workdir + "/checkpoints", lambda meta: abstract)
assert meta["step"] == step and meta["processes"] == 2
np.testing.assert_array_equal(state["w"].addressable_shards[0].data, make(step)["w"].addressable_shards[0].data)
code = finish(workdir, signals.cause, step=step, last_checkpoint=saver.last_checkpoint)
print("step", step, flush=True)
jax.distributed.shutdown()
sys.exit(code)
"""


def test_two_processes_save_stop_and_restore_together(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    logs = [open(tmp_path / f"err{i}", "w+") for i in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(i), port, str(tmp_path)], stdout=subprocess.PIPE, stderr=logs[i], text=True
        )
        for i in range(2)
    ]
    try:
        for worker, log in zip(workers, logs):
            for line in worker.stdout:
                if line == "ready\n":
                    break
            else:
                log.seek(0)
                pytest.fail(log.read()[-3000:])
        workers[1].send_signal(signal.SIGTERM)  # one of them only: both have to stop
        outs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        for log in logs:
            log.close()
    assert [worker.returncode for worker in workers] == [75, 75], "".join(
        (tmp_path / f"err{i}").read_text()[-2000:] for i in range(2)
    )
    assert outs[0].split("step ")[1] == outs[1].split("step ")[1]
    assert "JPRM_EXIT cause=preempted" in outs[0] and "JPRM_EXIT" not in outs[1]
    step = json.loads((tmp_path / "exit_report.json").read_text())["step"]

    directory = tmp_path / "checkpoints"
    assert sorted(os.listdir(directory)) == ["000003", f"{step:06d}"]
    files = json.loads((directory / f"{step:06d}" / manifest.MANIFEST).read_text())["files"]
    assert any("process_1/" in name for name in files) and any("process_0/" in name for name in files)
    assert sorted(files) == manifest.files_under(directory / f"{step:06d}")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = {
        "w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=one),
        "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=one),
    }
    state, _ = checkpoint.restore(directory, lambda meta: template)
    np.testing.assert_array_equal(state["w"], np.arange(4096.0).reshape(64, 64) + step)
