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
    """Training prompts of the RL phase; those that do not fit the window are left out and counted.

    Raises:
      UserError: none fits, or the task knows its longest prompt and that one does not.
    """
    limit = run.config.sampling.max_prompt
    if run.task.longest is not None:
        prompt = run.task.longest[0]
        _check_longest(run, prompt, len(run.builder.prompt_ids(prompt)), limit, "prompt", "config.sampling.max_prompt")
    return PromptBatches(run.task.train, run.builder, length=limit, seed=run.config.seed + 1)


def sft_batches(run: Run) -> SequenceBatches:
    """Rows of supervised training: files of prompt/response rows, or the task's own demonstrations (another draw each time).

    Raises:
      UserError: there is nothing to imitate, or nothing that fits, or the task knows its longest demonstration and that one
        does not.
    """
    config, where = run.config, "config.sft.max_length"
    form: dict[str, Any] = dict(length=config.sft.max_length or run.length, seed=config.seed, where=where)
    if config.sft.data:
        return SequenceBatches(read_demonstrations(config.sft.data), _pair, run.builder, **form)
    if run.task.longest is not None:
        prompt, response = run.task.longest
        ids, _ = run.builder.encode(prompt, response)
        _check_longest(run, prompt + response, len(ids), form["length"], "demonstration", where)
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


def _check_longest(run: Run, text: str, size: int, limit: int, what: str, where: str) -> None:
    """Refuses a window that a task's longest row, of ``size`` ids, does not fit: it might be drawn hours from now.

    Only with a tokenizer that gives every character an id: with others the longest text need not have the most ids, and rows
    that do not fit are passed over where they are drawn.
    """
    if size > limit and len(run.tokenizer(text, add_special_tokens=False).input_ids) == len(text):
        raise UserError(
            f"a task whose longest {what} has {size} tokens ({text})",
            expected=f"at most {limit}",
            where=where,
            fix=f"Set {where}={size}, or make the task's problems smaller",
        )


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
