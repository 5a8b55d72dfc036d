"""Checkpoints: what was saved comes back bit for bit, and damage is noticed.

Seen to fail: without the comparison of sums (bit flip) or sizes (truncated), with candidates oldest first, with the shardings of
the file (resharding), with the write in place (kills), with keep + 1, without set-aside, with the writer's error swallowed.
"""

import functools
import json
import logging
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import time

import flax.struct
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jprm.errors import UserError
from jprm.train import checkpoint, manifest, saver
from jprm.train.exits import Stop
from jprm.train.saver import Saver, check_space


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    reference: dict | None
    key: jax.Array


def make_state(step: int, size: int = 64) -> State:
    params = {"w": jax.random.normal(jax.random.key(step), (size, size)), "norm": jnp.full((size,), step, jnp.bfloat16)}
    return State(
        step=jnp.int32(step), params=params, opt_state=optax.adam(1e-3).init(params), reference=None, key=jax.random.key(step + 1)
    )


def abstract(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def largest_file(path):
    files = [pathlib.Path(path, name) for name in manifest.files_under(path)]
    return max(files, key=lambda file: file.stat().st_size)


@pytest.fixture(scope="module")
def template():
    return abstract(make_state(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three checkpoints, written once; tests that damage them work on a copy."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Saver(directory, keep=3) as s:
        for step in (1, 2, 3):
            s.save(step, make_state(step), {"config": {"seed": step}})
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


# ------------------------------------------------------------------------------------------------------------- round trips


def test_round_trip(saved, template):
    assert [p.name for p in checkpoint.latest(saved)] == ["000003", "000002", "000001"]
    state, meta = checkpoint.restore(saved, lambda meta: template)
    assert_equal(state, make_state(3))
    assert isinstance(state.opt_state[0], optax.ScaleByAdamState)
    assert meta["config"] == {"seed": 3} and meta["step"] == 3 and meta["code"]["jax"] == jax.__version__
    assert sorted(p.name for p in (saved / "000003").iterdir()) == ["MANIFEST.json", "arrays", "meta.json"]


def test_a_named_step(saved, template):
    state, _ = checkpoint.restore(saved, lambda meta: template, step=1)
    assert_equal(state, make_state(1))
    with pytest.raises(UserError) as e:
        checkpoint.restore(saved, lambda meta: template, step=7)
    assert e.value.found == "no checkpoint of step 7" and "000002" in e.value.expected


def test_a_relative_folder(tmp_path, template, monkeypatch):
    """The default workdir is one: runs/<name>."""
    monkeypatch.chdir(tmp_path)
    state = make_state(1)
    with Saver("runs/x/checkpoints", keep=1) as saver:
        saver.save(1, state, {})
    assert_equal(checkpoint.restore("runs/x/checkpoints", lambda meta: template)[0], state)


def test_nothing_there_is_none(tmp_path, template):
    assert checkpoint.restore(tmp_path / "checkpoints", lambda meta: template) is None


def test_one_role_alone(saved, template):
    part, _ = checkpoint.restore(saved, lambda meta: {"params": template.params}, partial=True)
    assert_equal(part["params"], make_state(3).params)


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


def test_empty_arrays_and_configs(tmp_path):
    config = ml_collections.ConfigDict({"a": {"b": (1, 2)}, "lr": np.float32(0.5)})
    state = {"empty": jnp.zeros((0, 3)), "w": jnp.ones(2)}
    with Saver(tmp_path / "c", keep=1) as s:
        s.save(0, state, {"config": config})
    got, meta = checkpoint.restore(tmp_path / "c", lambda meta: abstract(state))
    assert_equal(got, state)
    assert meta["config"] == {"a": {"b": [1, 2]}, "lr": 0.5}


@pytest.mark.parametrize("shape, spec", [((8, 1), ("x", None)), ((4, 2), ("x", "y")), ((1, 1), (None, None))], ids=str)
def test_resharding(tmp_path, shape, spec):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 (virtual) devices")
    big = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    state = make_state(5)
    state = state.replace(
        params={**state.params, "w": jax.device_put(state.params["w"], NamedSharding(big, PartitionSpec("data")))}
    )
    with Saver(tmp_path / "c", keep=1) as s:
        s.save(5, state, {})
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    template = abstract(state, NamedSharding(mesh, PartitionSpec()))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    template = template.replace(params={**template.params, "w": w})
    got, _ = checkpoint.restore(tmp_path / "c", lambda meta: template)
    assert got.params["w"].sharding == w.sharding
    assert len(got.params["w"].addressable_shards) == len(devices)
    assert_equal(got, state)


# ------------------------------------------------------------------------------------------------------------------ damage


def flip_one_bit(path):
    file = largest_file(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def truncate(path):
    file = largest_file(path)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "one bit flipped": (flip_one_bit, "SHA-256"),
    "truncated": (truncate, "bytes, the manifest says"),
    "file deleted": (lambda path: largest_file(path).unlink(), "missing"),
    "meta deleted": (lambda path: (path / "meta.json").unlink(), "meta.json: missing"),
    "no manifest": (lambda path: (path / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
    "manifest cut": (lambda path: (path / "MANIFEST.json").write_text("{"), "MANIFEST.json cannot be read"),
}


@pytest.mark.parametrize("damage, says", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_falls_back_and_names_both(copy, template, caplog, damage, says):
    newest = checkpoint.latest(copy)[0]
    assert manifest.verify(newest) == []
    damage(newest)
    assert says in manifest.verify(newest)[0]
    with caplog.at_level(logging.WARNING, "jprm"):
        state, meta = checkpoint.restore(copy, lambda meta: template)
    assert_equal(state, make_state(2))
    assert meta["step"] == 2
    (warning,) = caplog.messages
    assert "000003 is damaged" in warning and says in warning and "000002 instead" in warning
    with pytest.raises(UserError, match="000003"):  # asked for by number: nothing else will do
        checkpoint.restore(copy, lambda meta: template, step=3)


def test_all_damaged_is_an_error(copy, template):
    for path in checkpoint.latest(copy):
        flip_one_bit(path)
    with pytest.raises(UserError) as e:
        checkpoint.restore(copy, lambda meta: template)
    assert all(f"00000{i}: " in e.value.found for i in (1, 2, 3)) and e.value.where == str(copy)


def test_a_folder_under_another_number_is_damage(copy):
    os.rename(copy / "000003", copy / "000009")
    assert "is of step 3" in manifest.verify(copy / "000009")[0]


def test_left_over_folders_are_ignored_and_removed(copy, template):
    (copy / "000004.tmp" / "arrays").mkdir(parents=True)
    state, _ = checkpoint.restore(copy, lambda meta: template)
    assert int(state.step) == 3
    with Saver(copy, keep=5, resumed_from=3) as s:
        s.save(5, make_state(5), {})
    assert sorted(os.listdir(copy)) == ["000001", "000002", "000003", "000005"]


def test_a_future_that_is_not_continued_is_set_aside(copy, template):
    flip_one_bit(copy / "000003")
    with Saver(copy, keep=1, resumed_from=1) as s:
        s.save(3, make_state(30).replace(step=jnp.int32(3)), {})
    assert sorted(os.listdir(copy)) == ["000002.aside", "000003", "000003.aside"]
    state, _ = checkpoint.restore(copy, lambda meta: template)
    assert_equal(state.params, make_state(30).params)


# -------------------------------------------------------------------------------------------------------- another state or config


def changed(template, **kinds):
    params = dict(template.params)
    if "shape" in kinds:
        params["w"] = jax.ShapeDtypeStruct((64, 65), jnp.float32, sharding=params["w"].sharding)
    if "dtype" in kinds:
        params["w"] = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=params["w"].sharding)
    if "missing" in kinds:
        params["bias"] = params["norm"]
    if "extra" in kinds:
        del params["norm"]
    return template.replace(params=params)


MISMATCH = {
    "shape": ("params.w", "float32[64, 64]", "float32[64, 65]"),
    "dtype": ("params.w", "float32[64, 64]", "bfloat16[64, 64]"),
    "missing": ("params.bias", "no such array", "bfloat16[64]"),
    "extra": ("params.norm", "bfloat16[64]", "no such array in this run's state"),
}


@pytest.mark.parametrize("kind", MISMATCH)
def test_another_tree_names_the_array(saved, template, kind):
    name, found, expected = MISMATCH[kind]
    with pytest.raises(UserError) as e:
        checkpoint.restore(saved, lambda meta: changed(template, **{kind: True}))
    assert e.value.found == found and e.value.expected == expected
    assert f"'{name}'" in e.value.where and "000003" in e.value.where and "config" in e.value.fix


def test_an_abstract_state_without_shardings_is_refused(saved, template):
    with pytest.raises(ValueError, match="no sharding"):
        checkpoint.restore(saved, lambda meta: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), template))


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


def test_meta_is_json_anyone_can_read(saved):
    meta = json.loads((saved / "000003/meta.json").read_text())
    assert meta["leaves"]["params.w"] == {"shape": [64, 64], "dtype": "float32"}
    assert meta["leaves"]["key"] == {"shape": [], "dtype": "key<fry>"}
