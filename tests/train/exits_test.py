"""How a run ends.

Seen to fail: with the second Ctrl-C swallowed, with `resumable` not asking for a checkpoint, with a cause's cause not looked at.
"""

import json
import logging
import os
import signal
import subprocess
import sys

import jax
import ml_collections
import pytest

from jprm.errors import UserError
from jprm.train import exits
from jprm.train.exits import EXITS, Stop, StopSignals, cause_of, finish
from jprm.train.same_run import check_same_run


def test_codes_are_distinct_and_documented():
    codes = [code for code, _ in EXITS.values()]
    assert len(set(codes)) == len(codes)
    rows = [
        line.split("|")[1:4] for line in exits.__doc__.splitlines() if line.startswith("| ") and "cause" not in line.split("|")[1]
    ]
    assert {c.strip(): (int(n), r.strip() == "yes") for c, n, r in rows} == {k: tuple(v) for k, v in EXITS.items()}


def raised_from(cause):
    error = RuntimeError("save failed")
    error.__cause__ = cause
    return error


CAUSES = {
    "user": (UserError("7 rows", expected="4", where="x", fix="y"), "user_error"),
    "stop": (Stop("non_finite", "8 iterations in a row"), "non_finite"),
    "ctrl-c": (KeyboardInterrupt(), "interrupted"),
    "disk": (OSError(28, "No space left on device"), "disk_full"),
    "disk, quota": (OSError(122, "Disk quota exceeded"), "disk_full"),
    "disk, by TensorStore": (
        ValueError("RESOURCE_EXHAUSTED: Failed writing: No space left on device [os_error_code='28']"),
        "disk_full",
    ),
    "disk, as a cause": (raised_from(OSError(28, "full")), "disk_full"),
    "memory": (MemoryError(), "out_of_memory"),
    "device memory": (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "out_of_memory"),
    "anything": (ZeroDivisionError(), "crash"),
    "another device error": (jax.errors.JaxRuntimeError("INTERNAL: x"), "crash"),
}


@pytest.mark.parametrize("error, cause", CAUSES.values(), ids=CAUSES)
def test_cause(error, cause):
    assert cause_of(error) == cause


def test_unknown_causes_are_refused():
    with pytest.raises(ValueError, match="none of"):
        Stop("tired", "")


def test_report_and_last_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/jprm", "train", "--config=a b.py"])
    code = finish(tmp_path, "preempted", step=123, last_checkpoint=tmp_path / "checkpoints/000123", message="SIGTERM")
    assert code == 75
    assert capsys.readouterr().out == "JPRM_EXIT cause=preempted step=123 resumable=yes\n"
    report = json.loads((tmp_path / "exit_report.json").read_text())
    assert report.pop("time")[:2] == "20"
    assert report == {
        "cause": "preempted",
        "code": 75,
        "step": 123,
        "last_checkpoint": str(tmp_path / "checkpoints/000123"),
        "resumable": True,
        "resume_command": "jprm train '--config=a b.py'",
        "message": "SIGTERM",
    }
    exits.clear_report(tmp_path)
    exits.clear_report(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "cause, checkpoint, resumable", [("crash", None, "no"), ("crash", "c", "yes"), ("done", "c", "no"), ("user_error", "c", "no")]
)
def test_resumable(tmp_path, capsys, cause, checkpoint, resumable):
    finish(tmp_path, cause, step=1, last_checkpoint=checkpoint)
    assert capsys.readouterr().out.endswith(f"resumable={resumable}\n")
    assert (json.loads((tmp_path / "exit_report.json").read_text())["resume_command"] is None) == (resumable == "no")


def test_a_report_that_cannot_be_written_does_not_cost_the_code(tmp_path, capsys, caplog):
    assert finish(tmp_path / "gone", "disk_full", step=5) == 74
    assert capsys.readouterr().out.startswith("JPRM_EXIT cause=disk_full step=5") and "could not be written" in caplog.text
    assert finish(None, "user_error", step=0) == 2


# ----------------------------------------------------------------------------------------------------------------- signals


def test_sigterm_sets_the_flag():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert not signals.stop_requested(1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat themselves
        assert signals.stop_requested(2) and signals.cause == "preempted"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_ctrl_c_interrupts(capsys):
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.stop_requested(1) and signals.cause == "interrupted"
        assert "Ctrl-C again" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


LOOP = """
import sys, time
from jprm.train.exits import StopSignals, finish
with StopSignals() as signals:
    for step in range(10**6):
        print(step, flush=True)
        time.sleep(.01)
        if signals.stop_requested(step):
            sys.exit(finish(sys.argv[1], signals.cause, step=step, last_checkpoint="c"))
"""


def test_a_process_leaves_with_its_code(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", LOOP, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    out = child.communicate(timeout=60)[0]
    assert child.returncode == 75
    assert out.splitlines()[-1].startswith("JPRM_EXIT cause=preempted step=")
    assert json.loads((tmp_path / "exit_report.json").read_text())["cause"] == "preempted"


# --------------------------------------------------------------------------------------------------------- config of a workdir

STORED = {
    "seed": 0,
    "model": {"dim": 96, "stops": [1, 2]},
    "rl": {"lr": 1e-4, "iterations": 80},
    "log": {"every": 1},
    "workdir": "a",
}


def config(**changes):
    new = ml_collections.ConfigDict(
        {
            "seed": 0,
            "model": {"dim": 96, "stops": (1, 2)},
            "rl": {"lr": 1e-4, "iterations": 80},
            "log": {"every": 1},
            "workdir": "a",
        }
    )
    new.update_from_flattened_dict(changes)
    return new


def test_the_same_config_resumes():
    assert check_same_run(STORED, config(), where="w") == []


def test_free_keys_may_change():
    changed = check_same_run(STORED, config(**{"log.every": 5, "rl.iterations": 90, "workdir": "b"}), where="w")
    assert changed == ["log.every: 1 -> 5", "rl.iterations: 80 -> 90", 'workdir: "a" -> "b"']


def test_other_keys_are_listed():
    with pytest.raises(UserError) as e:
        check_same_run(STORED, config(**{"rl.lr": 1e-3, "model.dim": 128, "log.every": 7}), where="run/checkpoints/000003")
    assert e.value.found == "another config: model.dim: 96 -> 128; rl.lr: 0.0001 -> 0.001"
    assert e.value.where == "run/checkpoints/000003"
    assert e.value.expected == "the config the run was started with"
    assert e.value.fix == "Set config.model.dim=96 and the others back, or name a new config.workdir"


def test_keys_of_another_version_are_warned_about(caplog):
    new = config()
    new.rl.new_option = True
    with caplog.at_level(logging.WARNING):
        check_same_run(STORED, new, where="w")
    assert "rl.new_option" in caplog.text
