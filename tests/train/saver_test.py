"""Saving: nothing that was complete is lost, whatever happens to the disk, the process or the arrays meanwhile.

Seen to fail: with the write in place (kills), with keep + 1, with the writer's error swallowed, with compressed arrays (memory).
"""

import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.errors import UserError
from jprm.train import checkpoint, manifest, saver
from jprm.train.exits import Stop
from jprm.train.saver import Saver, check_space
from tests.train.states import abstract, assert_equal, make_state


@pytest.fixture(scope="module")
def template():
    return abstract(make_state(0))


# ------------------------------------------------------------------------------------------------------- while the run goes on


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
    @functools.partial(jax.jit, donate_argnums=0)
    def overwrite(state):
        return state.replace(step=state.step + 1, params=jax.tree.map(lambda x: x * 0 - 7, state.params))

    state, host = make_state(1, size=512), np.arange(100_000)
    want, template = jax.tree.map(jnp.copy, state), abstract(state)
    with Saver(tmp_path / "c", keep=9) as s:
        for step in (1, 2, 3):
            s.save(step, {"state": state, "host": host}, {})
            state = overwrite(overwrite(state))
            jax.block_until_ready(state)
            host[:] = -1
            state, host = state.replace(step=jnp.int32(step + 1), params=jax.tree.map(jnp.copy, want.params)), np.arange(100_000)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host_template = jax.ShapeDtypeStruct((100_000,), host.dtype, sharding=one)
    for step in (1, 2, 3):
        got, _ = checkpoint.restore(tmp_path / "c", lambda meta: {"state": template, "host": host_template}, step=step)
        assert_equal(got["state"].params, want.params)
        np.testing.assert_array_equal(got["host"], np.arange(100_000))


MEMORY = """
import sys, jax, numpy as np
from jprm.train.saver import Saver

def kib(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0])

update = jax.jit(lambda state: [x * 0.999 for x in state], donate_argnums=0)
rng = np.random.default_rng(0)
state = [jax.device_put(rng.standard_normal((1024, 4096), np.float32)) for _ in range(16)]
state = jax.block_until_ready(update(update(state)))
with Saver(sys.argv[1] + "/warm", keep=1) as s:
    s.save(1, [np.ones(9)], {})
open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
before = kib("VmRSS")
with Saver(sys.argv[1] + "/c", keep=1) as s:
    s.save(1, state, {})
    jax.block_until_ready(update(state))
print((kib("VmHWM") - before) / (16 * 16 * 1024))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory is measured the Linux way")
def test_a_save_holds_one_copy_of_the_state(tmp_path):
    """… beside the one that training goes on with: what is written is not held a second time."""
    out = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert 0.5 < float(out) < 1.5


def test_step_and_name_agree(tmp_path):
    with Saver(tmp_path / "c", keep=1) as s, pytest.raises(ValueError, match="checkpoint 4 of a state at step 3"):
        s.save(4, make_state(3), {})


# ------------------------------------------------------------------------------------------------- retention, errors, full disk


RETENTION = {
    "last one": (1, None, None, [6]),
    "last two": (2, None, None, [5, 6]),
    "and every third": (1, 3, None, [3, 6]),
    "more than there are": (9, None, None, [1, 2, 3, 4, 5, 6]),
}


@pytest.mark.parametrize("keep, every, resumed, left", RETENTION.values(), ids=RETENTION)
def test_retention(tmp_path, keep, every, resumed, left):
    with Saver(tmp_path / "c", keep=keep, keep_every=every, resumed_from=resumed) as s:
        for step in range(1, 7):
            s.save(step, {"w": jnp.full(3, step)}, {})
    assert sorted(os.listdir(tmp_path / "c")) == [f"{i:06d}" for i in left]


def test_keep_zero_is_refused(tmp_path):
    with pytest.raises(UserError) as e:
        Saver(tmp_path, keep=0)
    assert e.value.where == "config.checkpoint.keep" and e.value.found == "0"


def test_the_same_step_twice_writes_once(tmp_path):
    with Saver(tmp_path / "c", keep=2) as s:
        s.save(1, {"w": jnp.ones(3)}, {})
        s.wait()
        before = os.stat(tmp_path / "c/000001/MANIFEST.json").st_mtime_ns
        s.save(1, {"w": jnp.ones(3)}, {})
        s.wait()
        assert os.stat(tmp_path / "c/000001/MANIFEST.json").st_mtime_ns == before
        assert s.last_checkpoint.name == "000001"


def test_an_error_of_the_writer_surfaces(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("broken writer")

    s = Saver(tmp_path / "c", keep=1)
    monkeypatch.setattr(manifest, "write_manifest", broken)
    s.save(1, {"w": jnp.ones(3)}, {})
    with pytest.raises(RuntimeError, match="broken writer"):
        s.save(2, {"w": jnp.ones(3)}, {})
    assert os.listdir(tmp_path / "c") == [] and s.last_checkpoint is None
    with pytest.raises(RuntimeError, match="broken writer"), Saver(tmp_path / "c", keep=1) as s:
        s.save(1, {"w": jnp.ones(3)}, {})


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 3 MiB where this process may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", path], capture_output=True
    )
    if not mount or mount.returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_survived_once(small_disk, caplog):
    big, tiny = {"w": jax.random.normal(jax.random.key(0), (2_000_000,))}, {"w": jnp.ones(10)}
    s = Saver(small_disk / "c", keep=2)
    s.save(1, tiny, {})
    assert s.wait()
    s.save(2, big, {})
    assert not s.wait() and s.failures == 1
    assert "NO SPACE for checkpoint 2" in caplog.text and "000001" in caplog.text
    assert os.listdir(small_disk / "c") == ["000001"]
    s.save(3, tiny, {})
    assert s.wait() and s.failures == 1 and s.last_checkpoint.name == "000003"
    s.save(4, big, {})
    s.save(5, big, {})
    with pytest.raises(Stop) as e:
        s.wait()
    assert e.value.cause == "disk_full" and s.failures == 3
    assert sorted(os.listdir(small_disk / "c")) == ["000001", "000003"]


def test_no_space_while_committing(tmp_path, monkeypatch):
    """The same where nothing can be mounted: the system refuses to flush the files."""

    def full(descriptor):
        raise OSError(28, "No space left on device")

    s = Saver(tmp_path / "c", keep=2)
    monkeypatch.setattr(os, "fsync", full)
    s.save(1, {"w": jnp.ones(10)}, {})
    assert not s.wait() and os.listdir(tmp_path / "c") == []
    with pytest.raises(Stop, match="two saves in a row"):
        s.save(2, {"w": jnp.ones(10)}, {})
        s.wait()


def test_space_is_checked_before_the_run(tmp_path, template):
    check_space(tmp_path / "c", template, keep=2)
    assert (
        checkpoint.state_bytes({"w": jnp.zeros((3, 4)), "key": jax.random.key(0), "h": jnp.zeros(5, jnp.bfloat16)}) == 48 + 8 + 10
    )
    with pytest.raises(UserError) as e:
        check_space(tmp_path / "c", {"w": jax.ShapeDtypeStruct((2**50,), jnp.float32)}, keep=2)
    assert "MiB free" in e.value.found and e.value.expected.startswith(f"{3 * 2**32} MiB") and e.value.where == "config.workdir"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="a folder that can be written"):
        check_space(tmp_path / "file" / "c", template, keep=2)


# ------------------------------------------------------------------------------------------------------------ object stores


@pytest.fixture
def store(monkeypatch):
    """A local folder that claims to be an object store: no rename, no fsync."""
    monkeypatch.setattr(manifest, "is_object_store", lambda path: True)
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("fsync on an object store"))


def test_object_store_commits_by_manifest(tmp_path, store, template):
    (tmp_path / "c/000007/arrays").mkdir(parents=True)  # what a killed save leaves there
    with Saver(tmp_path / "c", keep=2) as s:
        for step in (1, 2, 3):
            s.save(step, make_state(step), {})
    assert sorted(os.listdir(tmp_path / "c")) == ["000002", "000003"]
    state, _ = checkpoint.restore(tmp_path / "c", lambda meta: template)
    assert_equal(state, make_state(3))


def test_object_store_retention_uncommits_first(tmp_path, store, monkeypatch):
    removed = []
    monkeypatch.setattr(saver, "_remove", lambda path: removed.append((path.name, (path / "MANIFEST.json").exists())))
    with Saver(tmp_path / "c", keep=1) as s:
        for step in (1, 2):
            s.save(step, {"w": jnp.ones(3)}, {})
    assert removed == [("000001", False)]


def test_object_store_without_manifest_is_not_a_checkpoint(tmp_path, store, monkeypatch):
    s = Saver(tmp_path / "c", keep=2)
    monkeypatch.setattr(manifest, "write_manifest", lambda *args: None)
    s.save(1, {"w": jnp.ones(3)}, {})
    with pytest.raises(OSError, match="did not complete"):
        s.wait()
    assert checkpoint.latest(tmp_path / "c") == []


# ---------------------------------------------------------------------------------------------------------------- SIGKILL


def save_for_ever(directory, first):
    """Runs in a child until it is killed."""
    s = saver.Saver(directory, keep=2, resumed_from=first - 1 or None)
    for step in range(first, 10_000):
        s.save(step, make_state(step), {"config": {"seed": step}})


def test_killed_at_any_moment_the_newest_checkpoint_is_whole(tmp_path, template):
    directory, rng = tmp_path / "checkpoints", np.random.default_rng(0)
    server = multiprocessing.get_context(
        "forkserver"
    )  # forks from a process that has imported, but not started, JAX: fast and safe
    server.set_forkserver_preload(["jprm.train.saver", "optax", "flax", "pytest"])
    left_over, step = 0, 0
    for _ in range(8):
        child = server.Process(target=save_for_ever, args=(str(directory), step + 1))
        child.start()
        deadline = time.monotonic() + 60
        while not any(int(p.name) > step for p in checkpoint.latest(directory)) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0, 0.15)))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        left_over += any(name.endswith(".tmp") for name in os.listdir(directory))
        for path in checkpoint.numbered(directory):
            assert manifest.verify(path) == []
        state, meta = checkpoint.restore(directory, lambda meta: template)
        assert meta["step"] > step and meta["config"] == {"seed": meta["step"]}
        step = meta["step"]
        assert_equal(state, make_state(step))
    assert left_over, "no kill hit a save: the test shows nothing"
