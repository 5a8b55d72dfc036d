"""What each phase reads: prompts, demonstrations, or outcome-labelled responses, as indexed batches."""

import logging
from typing import Any

from jprm.data.batches import PromptBatches, SequenceBatches
from jprm.data.schemas import Pair, read_demonstrations, read_labelled
from jprm.errors import UserError
from jprm.tasks.task import Problem
from jprm.train.setup import Run

log = logging.getLogger(__name__)


def prompt_batches(run: Run) -> PromptBatches:
    """Training prompts of the RL phase; those that do not fit the window are left out and counted."""
    return PromptBatches(run.task.train, run.builder, length=run.config.sampling.max_prompt, seed=run.config.seed + 1)


def sft_batches(run: Run) -> SequenceBatches:
    """Rows of supervised training: files of prompt/response rows, or the task's own demonstrations (another draw each time).

    Raises:
      UserError: there is nothing to imitate.
    """
    config = run.config
    form: dict[str, Any] = dict(length=config.sft.max_length or run.length, seed=config.seed, where="config.sft.max_length")
    if config.sft.data:
        return SequenceBatches(read_demonstrations(config.sft.data), _pair, run.builder, **form)
    problems = run.task.train

    def demonstrate(problem: Problem, draw: int) -> tuple | None:
        text = run.task.demonstration(problem, draw)
        return None if text is None else (problem.prompt, text, None)

    if all(demonstrate(problems[i], 0) is None for i in range(min(len(problems), 1000))):
        raise UserError(
            f"task {run.task.name!r}, which has no demonstrations",
            expected="rows to imitate",
            where="config.sft.data",
            fix="Set config.sft.data to a file of prompt/response rows, or config.sft.steps=0",
        )
    return SequenceBatches(problems, demonstrate, run.builder, **form)


def labelled_batches(run: Run) -> SequenceBatches:
    """Outcome-labelled rows of the offline PRM.

    Raises:
      UserError: no data named, or labels of one class only.
    """
    config = run.config
    if not config.prm.data:
        raise UserError(
            "no data",
            expected="files of prompt/response/label rows",
            where="config.prm.data",
            fix="Set config.prm.data, or config.prm.steps=0",
        )
    rows = read_labelled(config.prm.data)
    right = sum(row.label for row in rows)
    if right in (0, len(rows)):
        raise UserError(
            f"{len(rows)} rows that are all labelled {int(right > 0)}",
            expected="right and wrong responses",
            where="config.prm.data",
            fix="Add rows of the other label: a reward model cannot learn from one kind",
        )
    log.info("labelled rows: %d right, %d wrong", right, len(rows) - right)
    return SequenceBatches(
        rows, _pair, run.builder, length=config.prm.max_length or run.length, seed=config.seed, where="config.prm.max_length"
    )


def _pair(row: Pair, draw: int) -> tuple:
    return row.prompt, row.response, row.label
