"""Numbers that a config may hold.

Seen to fail: a field left out of the table, open ends taken for closed ones, nan let through, a run that does not look.
"""

import pytest

from jprm.errors import UserError
from jprm.train.bounds import BOUNDS, check_numbers, numbers
from jprm.train.config import default_config
from tests.train.tiny import refused, tiny_config

WRONG = {
    "sft.batch_size": (0, "at least 1", "=1"),
    "eval.samples": (-1, "at least 1", "=1"),
    "rl.iterations": (-1, "at least 0", "=0"),
    "rl.process_weight": (float("nan"), "a finite number", "=0"),
    "rl.optimizer.lr": (float("inf"), "a finite number", "=0"),
    "prm.beta": (0.0, "more than 0", " to such a number"),
    "sampling.top_p": (1.5, "more than 0 and at most 1", "=1"),
    "task.split_by_hash": (1.0, "at least 0 and less than 1", " to such a number"),
    "rl.optimizer.b2": (1.0, "at least 0 and less than 1", " to such a number"),
}


def test_every_number_has_its_bounds():
    assert numbers(default_config()).keys() == BOUNDS.keys()
    check_numbers(default_config())


@pytest.mark.parametrize("key", WRONG)
def test_a_number_out_of_bounds(key):
    value, expected, fix = WRONG[key]
    config = default_config()
    with config.unlocked():
        config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError) as error:
        check_numbers(config)
    e = error.value
    assert (e.found, e.expected, e.where, e.fix) == (f"{value}", expected, f"config.{key}", f"Set config.{key}{fix}")


def test_a_run_asks_before_it_touches_anything(tmp_path):
    error = refused(tiny_config(tmp_path / "run", sft=1, sft__batch_size=0))
    assert error.where == "config.sft.batch_size" and not (tmp_path / "run").exists()


def test_a_model_that_is_not_there(tmp_path):
    error = refused(tiny_config(tmp_path / "run", sft=1, model__path=str(tmp_path / "nowhere")))
    assert error.where == "config.model.path" and "nowhere" in error.found


def test_a_dual_clip_that_would_clip_everything(tmp_path):
    assert refused(tiny_config(tmp_path / "run", rl=1, rl__dual_clip=0.5)).where == "config.rl.dual_clip"


LATE = {
    "export.dtype": "foo",
    "prm.reference_logps": "foo",
    "prm.path": "nowhere",
    "sampling.stop_strings": ("",),
    "rl.band_low": 2.0,
    "seed": -1,
}


@pytest.mark.parametrize("key", LATE)
def test_what_only_a_later_phase_would_read(tmp_path, key):
    error = refused(tiny_config(tmp_path / "run", sft=1, **{key.replace(".", "__"): LATE[key]}))
    assert error.where == f"config.{key}" and not (tmp_path / "run").exists()


def test_a_prm_without_weights(tmp_path):
    (tmp_path / "empty").mkdir()
    error = refused(tiny_config(tmp_path / "run", sft=1, prm__path=str(tmp_path / "empty")))
    assert "empty" in error.where and not (tmp_path / "run").exists()
