"""metrics.jsonl is the history of one run, whatever happened to it.

Seen to fail: with the value written as it is, without the cut, with the half row read, with time starting anew.
"""

import json
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.train.metrics import MetricsWriter, RunLog, cut_history, read_metrics


def write(workdir, steps, resumed_from=None, **options):
    with MetricsWriter(workdir, resumed_from=resumed_from, **options) as writer:
        for step in steps:
            writer.write(step, "rl", {"critic/score/mean": step / 10})


def test_a_row(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        values = {
            "actor/loss": jnp.float32(0.5),
            "prm/lr": np.float64(1e-4),
            "n": 3,
            "b": jnp.ones((1,), jnp.bfloat16),
            "t": np.bool_(True),
        }
        writer.write(1, "rl", values)
        (row,) = read_metrics(tmp_path / "metrics.jsonl")  # readable while the run goes on
    assert list(row)[:3] == ["step", "phase", "time_s"]
    assert {k: row[k] for k in values} == {"actor/loss": 0.5, "prm/lr": 1e-4, "n": 3.0, "b": 1.0, "t": 1.0}
    assert row["step"] == 1 and row["phase"] == "rl" and row["time_s"] >= 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, jnp.float32(jnp.nan)], ids=str)
def test_non_finite_is_null_with_its_key(tmp_path, value):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, "rl", {"actor/loss": value, "actor/lr": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"actor/loss": null' in text and "NaN" not in text and "Infinity" not in text
    assert json.loads(text)["actor/lr"] == 1.0


@pytest.mark.parametrize("value", [np.ones(2), "text", np.array("text"), None, 1j], ids=str)
def test_what_is_no_number_is_refused(tmp_path, value):
    with MetricsWriter(tmp_path, tensorboard=False) as writer, pytest.raises(TypeError, match="'a/b'"):
        writer.write(1, "rl", {"a/b": value})


def test_resume_cuts_what_was_not_restored(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, [5, 6], resumed_from=4)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
    write(tmp_path, [1])  # a run that starts, starts its history
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_time_goes_on_after_a_resume(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "phase": "rl", "time_s": 1000.0}\n')
    write(tmp_path, [4], resumed_from=3)
    assert 1000.0 <= read_metrics(tmp_path / "metrics.jsonl")[1]["time_s"] < 1100.0


@pytest.mark.parametrize(
    "tail", ['{"step": 3, "pha', '{"step": 3, "phase": "rl"}'], ids=["half a row", "a row without its newline"]
)
def test_a_row_cut_by_a_kill_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "phase": "rl"}\n{"step": 2, "phase": "rl"}\n' + tail)
    assert [row["step"] for row in cut_history(path, 9)] == [1, 2]
    assert path.read_text().endswith('"step": 2, "phase": "rl"}\n')
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_holds_the_same(tmp_path):
    write(tmp_path, [1, 2])
    (file,) = (tmp_path / "tb").iterdir()
    assert file.name.startswith("events.out") and b"critic/score/mean" in file.read_bytes()


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write(tmp_path, [1])
    assert list(tmp_path.iterdir()) == []


def test_run_log(tmp_path, capsys):
    for round in (1, 2):
        with RunLog(tmp_path):
            logging.getLogger("jprm.train").info("started %d", round)
            logging.getLogger("jprm.train").warning("look here")
            logging.getLogger("some.library").info("chatter")
            logging.getLogger("some.library").warning("library warns")
    logging.getLogger("jprm.train").warning("after the run")
    text = (tmp_path / "run.log").read_text()
    assert "started 1" in text and "started 2" in text and text.count("look here") == 2 and text.count("library warns") == 2
    assert "chatter" not in text and "after the run" not in text
    err = capsys.readouterr().err
    assert "WARNING: look here" in err and "started" not in err
