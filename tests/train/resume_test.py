"""Resuming, tested by killing a real process: what is resumed ends where the uninterrupted run ends, to the bit.

Arrays of the last checkpoint and every row of metrics.jsonl (times aside) are compared. The processes see one device.
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jprm.train import checkpoint
from jprm.train.metrics import read_metrics
from tests.conftest import ROOT
from tests.train.tiny import write_labelled

RECIPE = """
from tests.train.tiny import tiny_config

def get_config(arg=""):
    c = tiny_config("", **{settings!r}).unlock()
    c.checkpoint.every, c.checkpoint.keep = 3, 9
    return c
"""
PRIME = dict(sft=4, rl=6)


class Runs:
    """Runs of one recipe in processes of their own."""

    def __init__(self, folder: pathlib.Path, **settings):
        self.folder, self.recipe = folder, folder / "recipe.py"
        self.recipe.write_text(RECIPE.format(settings=settings))

    def command(self, name: str, driver: bool = True) -> tuple[list[str], dict[str, str]]:
        start = [str(ROOT / "tests" / "train" / "resume_driver.py")] if driver else ["-m", "jprm"]
        env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": str(ROOT)}
        return [sys.executable, *start, "train", f"--config={self.recipe}", f"--workdir={self.folder / name}"], env

    def __call__(self, name: str, **plan) -> subprocess.CompletedProcess:
        """One process; ``plan`` as in resume_driver.py."""
        command, env = self.command(name)
        done = subprocess.run(
            command, env=env | {"PLAN": json.dumps(plan)}, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        expected = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75}.get(plan.get("signal"), 0)
        assert done.returncode == expected, done.stdout + done.stderr
        return done

    def kill(self, name: str, at: int, after: int, number: int = signal.SIGKILL) -> subprocess.CompletedProcess:
        return self(name, at=at, after=after, signal=number)

    def rows(self, name: str) -> list[dict]:
        """metrics.jsonl without what a clock says."""
        rows = read_metrics(self.folder / name / "metrics.jsonl")
        return [{k: v for k, v in row.items() if not k.startswith(("time_s", "timing_s"))} for row in rows]

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Every array of the newest checkpoint, by name."""
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def template(meta):
            return {k: jax.ShapeDtypeStruct(tuple(d["shape"]), d["dtype"], sharding=here) for k, d in meta["leaves"].items()}

        state, _ = checkpoint.restore(self.folder / name / "checkpoints", template)
        return jax.device_get(state)

    def copy(self, name: str, other: str) -> None:
        shutil.copytree(self.folder / name, self.folder / other)

    def assert_same(self, name: str, other: str) -> None:
        a, b = self.arrays(name), self.arrays(other)
        assert a.keys() == b.keys() and len(a) > 10
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)
        assert self.rows(name) == self.rows(other)


@pytest.fixture(scope="module")
def prime(tmp_path_factory):
    """A run to its end, and one that was killed in its RL phase."""
    runs = Runs(tmp_path_factory.mktemp("prime"), **PRIME)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # side by side: each needs little more than one core
        for done in [pool.submit(runs, "whole"), pool.submit(runs.kill, "killed", at=8, after=6)]:
            done.result()
    return runs


def test_prime_goes_on_after_a_kill_as_if_nothing_had_happened(prime):
    assert not (prime.folder / "killed" / "exit_report.json").exists()
    assert max(row["step"] for row in prime.rows("killed")) == 8  # two iterations that the checkpoint does not hold
    prime.copy("killed", "resumed")
    assert "resumed at iteration 6" in prime("resumed").stderr
    prime.assert_same("whole", "resumed")
    assert [row["step"] for row in prime.rows("whole")] == list(range(1, 11)) and prime.arrays("whole")["step"] == 10
    assert {row["phase"] for row in prime.rows("whole")} == {"sft", "rl"}
    learning = prime.rows("whole")[4:]
    assert all(row["actor/grad_norm"] > 0 and row["prm/grad_norm"] > 0 and 0 < row["critic/score/mean"] < 1 for row in learning)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["prm.opt_state", "prm.params", "policy.opt_state", "policy.params", "reference"])
def test_the_comparison_sees_an_array_that_was_lost(prime, lost):
    """Were one of these missing from the checkpoint, the test above would say so."""
    name = f"without {lost}"
    prime.copy("killed", name)
    prime(name, lose=[lost])
    with pytest.raises(AssertionError):
        prime.assert_same("whole", name)


@pytest.mark.slow
def test_a_lost_step_is_refused(prime):
    """`step` indexes data and keys: the loop looks at it before anything else."""
    prime.copy("killed", "without step")
    command, env = prime.command("without step")
    done = subprocess.run(
        command, env=env | {"PLAN": '{"lose": ["step"]}'}, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and "state.step = 0 in checkpoint 6" in done.stderr


@pytest.mark.slow
def test_killed_in_every_phase_and_told_to_stop(prime):
    """In SFT before anything was saved, in SFT after that, at the border of the phases, by SIGTERM in RL, and in the last
    iteration."""
    prime.kill("often", at=2, after=0)
    prime.kill("often", at=4, after=3)
    prime.kill("often", at=5, after=4)
    done = prime.kill("often", at=7, after=6, number=signal.SIGTERM)
    said = json.loads((prime.folder / "often" / "exit_report.json").read_text())
    assert (
        said["cause"] == "preempted"
        and said["resumable"]
        and said["step"] == int(pathlib.Path(said["last_checkpoint"]).name) == 8
    )
    assert "JPRM_EXIT cause=preempted step=8 resumable=yes" in done.stdout
    prime.kill("often", at=10, after=9)
    prime("often")
    prime.assert_same("whole", "often")
    rows = prime.rows("often")
    prime("often")  # nothing is left to do
    assert prime.rows("often") == rows


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_one_before(prime):
    prime.copy("killed", "damaged")
    for path in (prime.folder / "damaged" / "checkpoints" / "000006" / "arrays").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    done = prime("damaged")
    assert "resumed at iteration 4" in done.stderr and "000006 is damaged" in done.stderr and "000004" in done.stderr
    prime.assert_same("whole", "damaged")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "prm", "evaluated", "host"])
def test_other_jobs_go_on_after_a_kill(tmp_path, kind):
    """SFT alone, the offline PRM alone, PRIME with evaluations that a kill comes between, PRIME with a verifier on the host."""
    settings = {
        "sft": dict(sft=8),
        "prm": dict(prm=8, prm__data=(str(tmp_path / "rows.jsonl"),)),
        "evaluated": dict(rl=8, eval__problems=4, eval__batch=4, eval__samples=2, eval__every=3),
        "host": dict(rl=8, task__verifier="number"),
    }[kind]
    write_labelled(tmp_path / "rows.jsonl")
    runs = Runs(tmp_path, **settings)
    runs("whole")
    runs.kill("resumed", at=5 if kind != "evaluated" else 3, after=3 if kind != "evaluated" else 0)
    if kind == "evaluated":
        runs.kill("resumed", at=4, after=3)
        runs.kill("resumed", at=6, after=3, number=signal.SIGTERM)
    runs("resumed")
    runs.assert_same("whole", "resumed")


@pytest.mark.slow
def test_killed_from_outside(tmp_path):
    """`python -m jprm` itself, at whatever instant a checkpoint has become complete."""
    runs = Runs(tmp_path, sft=60)
    runs("whole")
    command, env = runs.command("resumed", driver=False)
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wanted = tmp_path / "resumed" / "checkpoints" / "000006" / "MANIFEST.json"
    while not wanted.exists() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    runs("resumed")
    runs.assert_same("whole", "resumed")
