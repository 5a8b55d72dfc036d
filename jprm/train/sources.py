"""Rows that a phase can train on, encoded and checked: those that do not fit are dropped, counted and said."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jprm.data.schemas import read_demonstrations, read_labelled
from jprm.data.sequence import encode_response, pad_rows
from jprm.errors import UserError
from jprm.tasks.task import Problem
from jprm.train.prompts import encode
from jprm.train.setup import Run

log = logging.getLogger(__name__)
GENERATED = 200_000  # more problems than this are made on access: they are checked one by one, not at the start
ToArrays = Callable[[Sequence[Any]], dict[str, np.ndarray]]


def usable_problems(run: Run) -> Sequence[Problem]:
    """Training problems whose prompt fits the window; a generated task's are all checked when they are used.

    Raises:
      UserError: none fits.
    """
    problems, width = run.task.train, run.config.sampling.max_prompt
    if len(problems) > GENERATED:
        return problems
    kept = [p for p in (problems[i] for i in range(len(problems))) if 0 < len(encode(run, p.prompt)) <= width]
    _account("prompts", len(problems), len(kept), f"longer than config.sampling.max_prompt={width} tokens, or empty", "config.sampling.max_prompt")
    return kept


def sft_rows(run: Run) -> tuple[Sequence[Any], ToArrays]:
    """Rows of supervised training and the function that turns a batch of them into arrays: files, or the task's demonstrations."""
    length = run.config.sft.max_length or run.length
    labels = lambda n: {"labels": np.zeros(n, np.float32)}
    if run.config.sft.data:
        pairs = read_demonstrations(run.config.sft.data)
        rows = _fitting(run, [(p.prompt, p.response, None) for p in pairs], length, "config.sft")
        return rows, lambda batch: pad_rows([r[:2] for r in batch], length) | labels(len(batch))
    problems = usable_problems(run)
    if run.task.demonstration(problems[0], 0) is None and len(problems) > GENERATED:
        raise UserError(f"task {run.task.name!r}, which has no demonstrations", expected="rows to imitate", where="config.sft.data",
                        fix="Set config.sft.data to a file of prompt/response rows, or config.sft.steps=0")
    if len(problems) > GENERATED:  # made on access: a problem met again gets another demonstration
        pick = lambda p: (encode(run, p.prompt), encode_response(run.tokenizer, run.task.demonstration(p, 0)))
        return problems, lambda batch: pad_rows([pick(p) for p in batch], length) | labels(len(batch))
    found = [(p.prompt, d, None) for p in problems if (d := run.task.demonstration(p, 0)) is not None]
    if not found:
        raise UserError(f"{len(problems)} problems without a demonstration", expected="rows to imitate", where="config.sft.data",
                        fix="Set config.sft.data to a file of prompt/response rows, or config.sft.steps=0")
    rows = _fitting(run, found, length, "config.sft")
    return rows, lambda batch: pad_rows([r[:2] for r in batch], length) | labels(len(batch))


def labelled_rows(run: Run) -> tuple[Sequence[Any], ToArrays]:
    """Outcome-labelled rows of the offline PRM and the function that turns a batch of them into arrays.

    Raises:
      UserError: no data named, or labels of one class only.
    """
    length = run.config.prm.max_length or run.length
    if not run.config.prm.data:
        raise UserError("no data", expected="files of prompt/response/label rows", where="config.prm.data", fix="Set config.prm.data, or config.prm.steps=0")
    rows = _fitting(run, [(p.prompt, p.response, p.label) for p in read_labelled(run.config.prm.data)], length, "config.prm")
    right = sum(label for *_, label in rows)
    if right in (0, len(rows)):
        raise UserError(f"{len(rows)} rows that are all labelled {int(right > 0)}", expected="right and wrong responses", where="config.prm.data",
                        fix="Add rows of the other label: a reward model cannot learn from one kind")
    log.info("labelled rows: %d right, %d wrong", right, len(rows) - right)
    return rows, lambda batch: pad_rows([r[:2] for r in batch], length) | {"labels": np.array([r[2] for r in batch], np.float32)}


def _fitting(run: Run, rows: Sequence[tuple], length: int, where: str) -> list[tuple[list[int], list[int], Any]]:
    kept = []
    for prompt, response, label in rows:
        ids = encode(run, prompt), encode_response(run.tokenizer, response)
        if ids[0] and len(ids[1]) > 1 and len(ids[0]) + len(ids[1]) <= length:
            kept.append((*ids, label))
    _account("rows", len(rows), len(kept), f"longer than {length} tokens, or without a prompt or a response", f"{where}.max_length")
    return kept


def _account(what: str, found: int, kept: int, reason: str, where: str) -> None:
    if not kept:
        raise UserError(f"no usable one among {found} {what}: all are {reason}", expected="at least one", where=where, fix=f"Raise {where}, or give other data")
    if found > kept:
        log.warning("%d of %d %s were dropped: %s", found - kept, found, what, reason)
