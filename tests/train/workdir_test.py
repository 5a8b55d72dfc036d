"""A workdir belongs to one run, and to one process at a time.

Seen to fail: without the lock, with the lock taken after the report is cleared, with a lone lock file taken for a foreign folder,
with the lock kept after a refusal, with the error of a file system that cannot lock passed on, with a new config let in beside a
checkpoint, with the old rows overwritten, with micro_batch tied.
"""

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jprm.errors import UserError
from jprm.train import exits, loop, setup
from jprm.train.metrics import read_metrics
from jprm.train.workdir import WorkdirLock, prepare_workdir
from tests.train.tiny import judged_by_a_coin, refused, tiny_config

HOLDER = """
import sys, time
from jprm.train.workdir import WorkdirLock
lock = WorkdirLock()
lock.acquire(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path/run`, where another run has begun."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(workdir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ------------------------------------------------------------------------------------------------ one process at a time


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path, holder):
    workdir = tmp_path / "run"
    config = tiny_config(workdir, sft=1)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    (workdir / "exit_report.json").write_text("the last word of an earlier start")
    before = files(workdir)
    e = refused(config)
    assert f"process {holder.pid} on " in e.found and "no other process" in e.expected
    assert e.where == str(workdir) and "stop it" in e.fix
    assert files(workdir) == before
    holder.send_signal(signal.SIGKILL)  # nothing is tidied up
    holder.wait()
    assert loop.run(config) == 0
    assert (workdir / "lock").read_text() == "" and json.loads((workdir / "exit_report.json").read_text())["cause"] == "done"


def test_a_workdir_that_is_just_being_made(tmp_path):
    """It holds nothing but the lock yet; that is no foreign folder."""
    lock = WorkdirLock()
    lock.acquire(tmp_path)
    assert "still going on" in refused(tiny_config(tmp_path, sft=1)).found
    lock.release()
    assert os.listdir(tmp_path) == ["lock"]


def test_a_run_that_ended_lets_the_next_one_in(tmp_path, monkeypatch):
    def broken(*args):
        raise UserError("something", expected="else", where="here", fix="mend it")

    monkeypatch.setattr(loop, "check_space", broken)
    held = refused(tiny_config(tmp_path, sft=1))  # its traceback keeps what the run held alive
    assert held.found == "something"
    lock = WorkdirLock()
    lock.acquire(tmp_path)
    lock.release()


def test_a_file_system_that_cannot_lock_stops_no_run(tmp_path, monkeypatch, caplog):
    def unable(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unable)
    lock = WorkdirLock()
    lock.acquire(tmp_path)
    lock.release()
    assert "cannot be locked (No locks available)" in caplog.text and str(tmp_path) in caplog.text


def test_a_store_is_no_workdir(monkeypatch, tmp_path):
    """`pathlib` would make a local folder `gs:` of it."""
    monkeypatch.chdir(tmp_path)
    error = refused(tiny_config("gs://bucket/run", sft=1))
    assert "gs://bucket/run" in error.found and error.where == "config.workdir"
    assert not list(tmp_path.iterdir())


def test_process_0_speaks_for_all(tmp_path, monkeypatch):
    run = setup.build(tiny_config(tmp_path / "run", sft=1))
    refuses = np.array([[1], [0]])
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda mine: refuses)
    with pytest.raises(UserError, match="process 0 refused") as error:
        prepare_workdir(run, WorkdirLock())
    assert error.value.where == str(tmp_path / "run") and "process 0" in error.value.fix and not (tmp_path / "run").exists()
    refuses[:] = 0
    assert prepare_workdir(run, WorkdirLock()) == tmp_path / "run" and files(tmp_path) == {}


# ------------------------------------------------------------------------------------------------ the config of a workdir


def begun(workdir, monkeypatch, **changes):
    """A run that ended of itself before its first checkpoint, with a row of metrics written."""

    def full(*args):
        raise MemoryError("too little")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_samples", full)
        assert loop.run(tiny_config(workdir, sft=3, **changes)) == exits.EXITS["out_of_memory"].code
    assert len(read_metrics(workdir / "metrics.jsonl")) == 1


def test_before_its_first_checkpoint_a_run_may_change_its_config(tmp_path, monkeypatch):
    begun(tmp_path, monkeypatch)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "000001.jsonl").write_text("{}\n")
    old = (tmp_path / "metrics.jsonl").read_text()
    assert loop.run(tiny_config(tmp_path, sft=3, sft__batch_size=16)) == 0
    assert (tmp_path / "metrics.jsonl.aside").read_text() == old
    assert (tmp_path / "samples.aside" / "000001.jsonl").exists()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    text = (tmp_path / "run.log").read_text()
    assert "sft.batch_size: 8 -> 16" in text and "no checkpoint" in text and "renamed to metrics.jsonl.aside" in text
    assert json.loads((tmp_path / "config.json").read_text())["sft"]["batch_size"] == 16
    before = files(tmp_path)
    assert "sft.batch_size: 16 -> 8" in refused(tiny_config(tmp_path, sft=3)).found  # now there is one
    assert files(tmp_path) == before


def test_a_checkpoint_that_appears_while_the_lock_is_waited_for(tmp_path, monkeypatch):
    """Another config was let in a moment before the first run saved and left: it is looked at again under the lock."""
    begun(tmp_path, monkeypatch)
    before, acquire = files(tmp_path), WorkdirLock.acquire

    def late(lock, workdir):
        (tmp_path / "checkpoints" / "000003").mkdir(parents=True)
        acquire(lock, workdir)

    monkeypatch.setattr(WorkdirLock, "acquire", late)
    assert "sft.batch_size: 8 -> 16" in refused(tiny_config(tmp_path, sft=3, sft__batch_size=16)).found
    after = files(tmp_path)
    assert all(after[name] == before[name] for name in ("config.json", "metrics.jsonl")) and not list(tmp_path.glob("*.aside"))


def test_fewer_iterations_than_are_done_touch_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "build", judged_by_a_coin)
    assert loop.run(tiny_config(tmp_path, rl=2)) == 0
    before = files(tmp_path)
    error = refused(tiny_config(tmp_path, rl=1))
    assert "iteration 2" in error.found and error.where == str(tmp_path / "checkpoints") and files(tmp_path) == before


def test_the_same_config_starts_again_without_leftovers(tmp_path, monkeypatch):
    begun(tmp_path, monkeypatch)
    assert loop.run(tiny_config(tmp_path, sft=3)) == 0
    assert not list(tmp_path.glob("*.aside")) and len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_a_layout_may_change_on_the_way(tmp_path, monkeypatch, caplog):
    """… and the run goes on with the same numbers, up to rounding."""

    def stop(signals, step):
        signals.cause = "preempted"
        return True

    one, other = tmp_path / "one", tmp_path / "other"
    layout = dict(sft__micro_batch=8, model__remat="full", model__unroll=2, model__logits_chunk=8)
    assert loop.run(tiny_config(one, sft=2, sft__batch_size=16)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(exits.StopSignals, "stop_requested", stop)
        assert loop.run(tiny_config(other, sft=2, sft__batch_size=16)) == 75
    with caplog.at_level(logging.INFO, "jprm"):
        assert loop.run(tiny_config(other, sft=2, sft__batch_size=16, **layout)) == 0
    assert "sft.micro_batch: 0 -> 8" in caplog.text
    a, b = (read_metrics(workdir / "metrics.jsonl")[1] for workdir in (one, other))
    assert b["sft/loss"] == pytest.approx(a["sft/loss"], rel=1e-5)
    assert b["sft/grad_norm"] == pytest.approx(a["sft/grad_norm"], rel=1e-4)
