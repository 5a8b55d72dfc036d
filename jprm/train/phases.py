"""What the loop calls: one program per phase, each with `iterate(state, step) -> Iteration`."""

import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np

from jprm.data import batches as data
from jprm.model.spec import Params
from jprm.rl.learner import scan_rows
from jprm.rl.step import Trace
from jprm.sharding.rules import sharding
from jprm.train.prompts import PromptBatch, place
from jprm.train.rl_phase import RLPhase, advance
from jprm.train.rollout import fetch
from jprm.train.setup import Run, balanced, micro_batches
from jprm.train.sources import labelled_batches, prompt_batches, sft_batches
from jprm.train.state import Phase, TrainState, state_shardings
from jprm.train.supervised import Rows, make_prm_step, make_sft_step, row_logps


@dataclasses.dataclass
class Iteration:
    """One dispatched iteration; its metrics may still be in flight.

    Attributes:
      state: after it.
      step: its number over all phases, 1-based.
      metrics: f32 scalars on the device, and counts of the batch.
      batch_ids: numbers of the rows or prompts it read, kept for the log where it fails.
      trace, prompts: of RL, for the sample files.
    """

    state: TrainState
    step: int
    metrics: dict[str, jax.Array | float]
    batch_ids: list[int]
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    trace: Trace | None = None
    prompts: PromptBatch | None = None
    started: float = 0.0

    def timings(self) -> dict[str, float]:
        """``timing_s/…`` in seconds, once the metrics have arrived; ``step`` is what neither ``gen`` nor ``verify`` took."""
        whole = self.parts.get("finished", time.perf_counter()) - self.started
        parts = {k: v for k, v in self.parts.items() if k.startswith("timing_s/")}
        return parts | ({"timing_s/step": max(0.0, whole - sum(parts.values()))} if parts else {}) | {"timing_s/iteration": whole}


class Program:
    """A phase's compiled iteration over its batches, which are a pure function of the iteration's number.

    An iteration's clock runs from the moment the one before it was finished: host work that the device hides costs nothing.
    """

    def __init__(self, run: Run, batches: data.PromptBatches | data.SequenceBatches, per_iteration: int, first: int):
        self.run, self.batches, self.per_iteration, self.first = run, batches, per_iteration, first
        self._pending: Iteration | None = None

    def read(self, step: int) -> tuple[data.PromptBatch | data.SequenceBatch, dict[str, float]]:
        """The batch of iteration ``step`` (0-based), and ``data/passed_over`` where rows are generated: how many drawn ones did
        not fit."""
        batch = self.batches.batch(step - self.first, self.per_iteration)
        return batch, {"data/passed_over": float(batch.passed_over)} if self.batches.generated else {}

    def wait(self) -> None:
        """Until the iteration before is finished (the device would wait for its parameters anyway); stops its clock."""
        if self._pending is not None:
            jax.block_until_ready(self._pending.metrics)
            self._pending.parts["finished"] = time.perf_counter()


class SupervisedProgram(Program):
    """SFT, or the offline PRM: rows -> one jitted step."""

    def __init__(self, run: Run, phase: Phase, step: Callable, batches: data.SequenceBatches, batch_size: int):
        super().__init__(run, batches, batch_size, phase.start)
        where = state_shardings(phase, run.cfg, run.mesh)
        self.step = jax.jit(lambda state, rows: advance(*step(state, rows)), donate_argnums=0, out_shardings=(where, None))
        self.cache: ReferenceCache | None = None

    def iterate(self, state: TrainState, step: int) -> Iteration:
        batch, counts = self.read(step)
        where = sharding(self.run.mesh, ("rows",))
        arrays = Rows(*(jax.device_put(x, where) for x in (batch.tokens, batch.lengths, batch.prompt_lengths, batch.labels)))
        if self.cache is not None:
            arrays = self.cache.add(state.reference, arrays, batch.rows)
        self.wait()
        started = time.perf_counter()
        state, metrics = self.step(state, arrays)
        self._pending = Iteration(state, step + 1, metrics | counts, batch.rows, started=started)
        return self._pending


class ReferenceCache:
    """Reference log-probs of labelled rows on the host, computed at a row's first visit: later epochs need no forward pass of
    the reference."""

    def __init__(self, run: Run, micro_batches: int):
        self.run, self.known = run, {}
        self._logps = jax.jit(lambda reference, rows: scan_rows(lambda r: row_logps(reference, run.cfg, r), rows, micro_batches))

    def add(self, reference: Params, rows: Rows, ids: list[int]) -> Rows:
        """The same rows with their ``reference_logps``."""
        if any(i not in self.known for i in ids):
            self.known |= dict(zip(ids, fetch(self._logps(reference, rows))))
        logps = np.stack([self.known[i] for i in ids])
        return rows.replace(reference_logps=jax.device_put(logps, sharding(self.run.mesh, ("rows",))))


class RLProgram(Program):
    """Prompts -> sample, verify, step."""

    def __init__(self, run: Run, phase: Phase):
        super().__init__(run, prompt_batches(run), run.config.rl.prompts * run.config.rl.oversample, phase.start)
        self.rl = RLPhase(run, phase)

    def iterate(self, state: TrainState, step: int) -> Iteration:
        batch, counts = self.read(step)
        prompts = place(self.run, batch)
        self.wait()
        started = time.perf_counter()
        state, metrics, trace, parts = self.rl.iterate(state, prompts)
        self._pending = Iteration(state, step + 1, metrics | counts, batch.rows, parts, trace, prompts, started)
        return self._pending


def make_program(run: Run, phase: Phase) -> SupervisedProgram | RLProgram:
    """The program of a phase, its rows read and checked."""
    config = run.config
    if phase.name == "rl":
        return RLProgram(run, phase)
    group = config.sft if phase.name == "sft" else config.prm
    cuts = micro_batches(group.batch_size, group.micro_batch)
    if phase.name == "sft":
        return SupervisedProgram(run, phase, make_sft_step(run.cfg, phase, cuts), sft_batches(run), group.batch_size)
    step = make_prm_step(run.cfg, phase, cuts, beta=config.prm.beta, balance=balanced(config))
    program = SupervisedProgram(run, phase, step, labelled_batches(run), group.batch_size)
    program.cache = ReferenceCache(run, cuts) if config.prm.reference_logps == "cache" else None
    return program
