"""What the loop calls: one program per phase, each with `iterate(state, step) -> Iteration`."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jprm.data.batches import Stream
from jprm.errors import UserError
from jprm.rl.step import Trace
from jprm.sharding.rules import sharding
from jprm.train.prompts import PromptBatch, prompt_batch
from jprm.train.rl_phase import RLPhase, advance
from jprm.train.setup import Run, micro_batches
from jprm.train.sources import labelled_rows, sft_rows, usable_problems
from jprm.train.state import Phase, TrainState
from jprm.train.supervised import Rows, make_prm_step, make_sft_step


@dataclasses.dataclass
class Iteration:
    """One dispatched iteration; its metrics may still be in flight.

    Attributes:
      state: after it.
      step: its number over all phases, 1-based.
      metrics: f32 scalars on the device.
      batch_ids: which rows or prompts it read, kept for the log where it fails.
      trace, prompts: of RL, for the sample files.
    """

    state: TrainState
    step: int
    metrics: dict[str, jax.Array]
    batch_ids: list[int]
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    trace: Trace | None = None
    prompts: PromptBatch | None = None
    started: float = 0.0

    def timings(self) -> dict[str, float]:
        """``timing_s/…`` in seconds; called once the metrics have arrived. ``step`` is what neither ``gen`` nor ``verify`` took."""
        whole = self.parts.get("finished", time.perf_counter()) - self.started
        parts = {k: v for k, v in self.parts.items() if k.startswith("timing_s/")}
        return parts | ({"timing_s/step": max(0.0, whole - sum(parts.values()))} if parts else {}) | {"timing_s/iteration": whole}


class Program:
    """A phase's compiled iteration over its stream of rows or prompts.

    An iteration's clock runs from the moment the one before it was finished, so that host work hidden behind the device costs nothing.
    """

    def __init__(self, run: Run, rows: Sequence[Any], per_iteration: int, seed: int, first: int):
        self.run, self.first = run, first
        self.stream = Stream(len(rows), seed=seed)
        self.rows, self.per_iteration = rows, per_iteration
        self._pending: Iteration | None = None

    def take(self, step: int) -> tuple[list[Any], list[int]]:
        """The rows of an iteration and their indices: a pure function of (seed, step)."""
        ids = self.stream.batch(step - self.first, self.per_iteration)
        return [self.rows[i] for i in ids], ids

    def wait(self) -> None:
        """Until the iteration before is finished (the device would wait for its parameters anyway); stops its clock."""
        if self._pending is not None:
            jax.block_until_ready(self._pending.metrics)
            self._pending.parts["finished"] = time.perf_counter()

    def close(self) -> None:
        self._pending = None


class SupervisedProgram(Program):
    """SFT, or the offline PRM: rows -> one jitted step."""

    def __init__(self, run: Run, phase: Phase, step: Callable, rows: Sequence[Any], group: Any, to_arrays: Callable[[Any], dict[str, np.ndarray]]):
        super().__init__(run, rows, group.batch_size, run.config.seed, phase.start)
        self.to_arrays = to_arrays
        self.step = jax.jit(lambda state, rows: advance(*step(state, rows)), donate_argnums=0)

    def iterate(self, state: TrainState, step: int) -> Iteration:
        rows, ids = self.take(step)
        place = sharding(self.run.mesh, ("rows",))
        batch = Rows(**{k: jax.device_put(v, place) for k, v in self.to_arrays(rows).items()})
        self.wait()
        started = time.perf_counter()
        state, metrics = self.step(state, batch)
        self._pending = Iteration(state, step + 1, metrics, ids, started=started)
        return self._pending


class RLProgram(Program):
    """Prompts -> sample, verify, step."""

    def __init__(self, run: Run, phase: Phase):
        r = run.config.rl
        super().__init__(run, usable_problems(run), r.prompts * r.oversample, run.config.seed + 1, phase.start)
        self.rl = RLPhase(run, phase)

    def iterate(self, state: TrainState, step: int) -> Iteration:
        problems, ids = self.take(step)
        batch = prompt_batch(self.run, problems)
        self.wait()
        started = time.perf_counter()
        state, metrics, trace, parts = self.rl.iterate(state, batch)
        self._pending = Iteration(state, step + 1, metrics, ids, parts, trace, batch, started)
        return self._pending


def make_program(run: Run, phase: Phase) -> SupervisedProgram | RLProgram:
    """The program of a phase, its rows read and checked."""
    config = run.config
    if phase.name == "rl":
        return RLProgram(run, phase)
    group = config.sft if phase.name == "sft" else config.prm
    cuts = micro_batches(group.batch_size, group.micro_batch)
    if phase.name == "sft":
        rows, to_arrays = sft_rows(run)
        return SupervisedProgram(run, phase, make_sft_step(run.cfg, phase, cuts), rows, group, to_arrays)
    if config.prm.balance not in ("batch", "none"):
        raise UserError(f"balance {config.prm.balance!r}", expected="batch or none", where="config.prm.balance", fix="Set config.prm.balance=batch")
    rows, to_arrays = labelled_rows(run)
    step = make_prm_step(run.cfg, phase, cuts, beta=config.prm.beta, balance=config.prm.balance == "batch")
    return SupervisedProgram(run, phase, step, rows, group, to_arrays)
