"""`jprm train`: one loop for every job. SFT, offline PRM and RL are phases of it; each may have length 0."""

import logging
import math
import sys
import time
from typing import Any

import jax
import numpy as np

from jprm.errors import UserError
from jprm.rl.learner import Learner
from jprm.train import checkpoint, exits
from jprm.train.evaluation import Evaluator
from jprm.train.example import marked_example
from jprm.train.metrics import METRICS, EarlyLog, MetricsWriter, RunLog, read_metrics
from jprm.train.phases import Iteration, Program, make_program
from jprm.train.progress import Progress
from jprm.train.prompts import replicated
from jprm.train.same_run import check_same_run
from jprm.train.samples import write_eval_samples, write_samples
from jprm.train.saver import Saver, check_space
from jprm.train.setup import Run, build
from jprm.train.state import Phase, TrainState, abstract_state, enter, make_phases, phase_of
from jprm.train.workdir import WorkdirLock, prepare_workdir
from jprm.train.wrap_up import wrap_up

log = logging.getLogger(__name__)
# Short names of the numbers worth a look while a phase runs.
WATCHED = {
    "sft": {"sft/loss": "loss"},
    "prm": {"prm/loss": "loss", "prm/auc": "auc"},
    "rl": {"critic/score/mean": "acc", "prm/auc": "prm auc", "response_length/mean": "len", "actor/entropy": "entropy"},
}


def run(config: Any) -> int:
    """Trains, or goes on where the workdir stands. Returns the process's exit code (see :mod:`jprm.train.exits`).

    Raises:
      UserError: whatever the user can mend; nothing has been overwritten then.
    """
    if config.log.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.log.compilation_cache)
    progress_made = {"step": 0, "last_checkpoint": None}
    workdir, lock = None, WorkdirLock()
    try:
        with EarlyLog() as early:
            run = build(config)
            try:
                phases = make_phases(config, run.cfg)
                # All data is read before anything is written.
                programs = {phase.name: make_program(run, phase) for phase in phases}
                evaluator = Evaluator(run) if config.eval.problems and phases[-1].has_policy else None
                workdir = prepare_workdir(run, lock)
                largest = max((abstract_state(phase, run.cfg, run.mesh) for phase in phases), key=checkpoint.state_bytes)
                check_space(workdir / "checkpoints", largest, config.checkpoint.keep)
                with RunLog(workdir), exits.StopSignals() as signals, jax.set_mesh(run.mesh):
                    early.hand_over()
                    try:
                        cause = train(run, phases, programs, evaluator, signals, progress_made)
                    except Exception as error:
                        if exits.cause_of(error) == "crash":
                            log.exception("the run ended")
                        raise
            finally:
                run.task.close()
        return exits.finish(workdir, cause, message="", **progress_made)
    except BaseException as error:
        code = exits.finish(workdir, exits.cause_of(error), message=str(error), **progress_made)
        if isinstance(error, UserError) or workdir is None:
            raise
        if not isinstance(error, exits.Stop):  # its traceback is in run.log and on the terminal
            print(f"jprm: {type(error).__name__}: {error}", file=sys.stderr)
        return code
    finally:
        lock.release()  # after the exit report: the next run would find this one's otherwise


def train(
    run: Run,
    phases: list[Phase],
    programs: dict[str, Program],
    evaluator: Evaluator | None,
    signals: exits.StopSignals,
    progress_made: dict,
) -> str:
    """All phases from wherever the run stands; returns the cause of its end (a key of ``exits.EXITS``)."""
    # ------------------------------------------------------------------------------------------------ where does the run stand?
    config, total = run.config, phases[-1].end
    state, resumed = start_or_resume(run, phases)
    step = int(state.step)
    progress_made.update(step=step)
    metrics = MetricsWriter(run.workdir, resumed_from=resumed, tensorboard=config.log.tensorboard)
    evaluated = {row["step"] for row in read_metrics(run.workdir / METRICS) if row["phase"] == "eval"}
    saver = Saver(run.workdir / "checkpoints", keep=config.checkpoint.keep, resumed_from=resumed)
    progress = Progress(interval_s=config.log.every_s)
    progress.say(f"{'resumed at iteration ' + str(step) if resumed else 'started'}: {run.workdir}")

    def save(step: int, state: TrainState, phase: Phase) -> None:
        saver.save(step, state, {"config": config.to_dict(), "phase": phase.name})
        metrics.flush()

    def evaluate(step: int, state: TrainState, *, thorough: bool) -> None:
        if step in evaluated or evaluator is None:
            return
        start = time.perf_counter()
        # Until the PRM has learnt anything it is its reference: every score is 0, its numbers would be noise about nothing.
        judged = step > phases[-1].start or config.prm.steps > 0 or bool(config.prm.path)
        numbers, scored = evaluator.measure(state, thorough=thorough, judged=judged)
        numbers["timing_s/eval"] = time.perf_counter() - start
        metrics.write(step, "eval", numbers)
        write_eval_samples(run, step, scored)
        evaluated.add(step)
        shown = {k.removeprefix("eval/"): v for k, v in numbers.items() if not math.isnan(v)}
        progress.say(f"evaluated at {step}: " + "  ".join(f"{k} {v:.3f}" for k, v in shown.items()))

    # ------------------------------------------------------------------------------------------------ the loop
    try:
        for phase in phases:
            if step >= phase.end:
                continue
            if step == phase.start:
                given = phase.has_prm and config.prm.path and state.prm is None
                state = enter(phase, state, run.cfg, run.mesh, run.load(config.prm.path) if given else None)
                if phase.name == "rl":
                    evaluate(step, state, thorough=True)
            program = programs[phase.name]
            if step == 0:
                progress.say(marked_example(run, phase.name, program, colour=sys.stderr.isatty()))
            progress.start(phase.name, phase.end - phase.start, step - phase.start)
            pending: Iteration | None = None
            while step < phase.end:
                # Before the next iteration, not after the last: a run that was killed in between is evaluated when it goes on.
                due = config.eval.every and (step - phase.start) % config.eval.every == 0
                if phase.name == "rl" and step > phase.start and due:
                    evaluate(step, state, thorough=False)
                done = program.iterate(state, step)
                state, step = done.state, step + 1
                if pending is not None:  # the device is busy with this iteration while the last one is written down
                    progress_made["step"] = pending.step
                    report(run, metrics, progress, phase, pending)
                pending = done
                stop = signals.stop_requested(step)
                last = step == phase.end
                if last or stop or (config.checkpoint.every and step % config.checkpoint.every == 0):
                    progress_made["step"] = step
                    report(run, metrics, progress, phase, pending)
                    pending = None
                    save(step, state, phase)
                if stop:
                    saver.wait()
                    return signals.cause

        # -------------------------------------------------------------------------------------------- the end
        evaluate(total, state, thorough=True)
        saver.wait()
        metrics.flush()
        progress.close()
        wrap_up(run, state)
        return "done"
    finally:
        progress.close()
        metrics.close()
        try:
            saver.wait()
        except Exception as error:
            log.error("the last save failed: %s", error)
        finally:  # whatever ends the wait, a further Ctrl-C too
            progress_made["last_checkpoint"] = saver.last_checkpoint


def start_or_resume(run: Run, phases: list[Phase]) -> tuple[TrainState, int | None]:
    """The newest whole checkpoint of the workdir, or the beginning: (state, step it was restored at, or None)."""
    folder = run.workdir / "checkpoints"

    def template(meta: dict) -> TrainState:
        check_same_run(meta["config"], run.config.to_dict(), where=str(run.workdir))
        return abstract_state(phase_of(phases, meta["step"]), run.cfg, run.mesh)

    found = checkpoint.restore(folder, template) if run.config.checkpoint.resume else None
    if found is None:
        if checkpoint.numbered(folder):
            raise UserError(
                "checkpoints",
                expected="an empty folder where config.checkpoint.resume=False",
                where=str(folder),
                fix="Set config.checkpoint.resume=True, or give another config.workdir",
            )
        zeros = (replicated(run, np.int32(0)) for _ in range(2))  # two arrays: a donated buffer must not be shared
        return TrainState(*zeros, policy=Learner(run.initial_params(), ())), None
    state, meta = found
    if int(state.step) != meta["step"]:
        raise UserError(
            f"state.step = {int(state.step)} in checkpoint {meta['step']}",
            expected="the same number",
            where=str(folder),
            fix="Remove this checkpoint; the one before it will be used",
        )
    return state, meta["step"]


def report(run: Run, metrics: MetricsWriter, progress: Progress, phase: Phase, done: Iteration) -> None:
    """Writes one finished iteration down; stops the run where too many in a row were thrown away.

    Raises:
      exits.Stop: ``non_finite``.
    """
    numbers = {k: float(v) for k, v in jax.device_get(done.metrics).items()}
    numbers |= done.timings()
    metrics.write(done.step, phase.name, numbers)
    # nan is a metric without data (a policy that waits has no entropy), except where it is the loss.
    short = {name: numbers[key] for key, name in WATCHED[phase.name].items() if key in numbers}
    short = {name: x for name, x in short.items() if name == "loss" or not math.isnan(x)}
    progress.update(done.step - phase.start, short, {k: v for k, v in numbers.items() if k.startswith("timing_s/")})
    write_samples(run, phase, done)
    if in_a_row := int(numbers["skipped_in_a_row"]):
        log.warning(
            "iteration %d: a loss or gradient was not finite; its updates were thrown away (%d in a row). Its rows: %s",
            done.step,
            in_a_row,
            done.batch_ids,
        )
        if in_a_row >= run.config.log.max_skipped:
            raise exits.Stop(
                "non_finite", f"{in_a_row} iterations in a row had a non-finite loss or gradient; the last is {done.step}"
            )
