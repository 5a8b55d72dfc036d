"""Checkpoints: what was saved comes back bit for bit, and damage is noticed.

Seen to fail: without the comparison of sums (bit flip) or sizes (truncated), with candidates oldest first, with the shardings of
the file (resharding), without set-aside.
"""

import json
import logging
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jprm.errors import UserError
from jprm.train import checkpoint, manifest
from jprm.train.saver import Saver
from tests.train.states import abstract, assert_equal, make_state


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


def test_meta_is_json_anyone_can_read(saved):
    meta = json.loads((saved / "000003/meta.json").read_text())
    assert meta["leaves"]["params.w"] == {"shape": [64, 64], "dtype": "float32"}
    assert meta["leaves"]["key"] == {"shape": [], "dtype": "key<fry>"}


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
