"""Batches as pure functions of (seed, iteration): one integer is the whole state of the data.

An order is a Grain dataset that is indexed, never iterated: shuffled, repeated for ever, shuffled anew in each epoch. Batch i
takes the elements i*n .. (i+1)*n - 1 of it, on any number of hosts and after any resume.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from jprm.data.sequence import Prompt, SequenceBuilder, fitting
from jprm.errors import UserError


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts for rollouts: `tokens` i32[P, L] right-padded, `lengths` i32[P], the problems behind them, and their integer
    columns as i32[P] (for verifiers on the device)."""

    problems: list[Any]
    tokens: np.ndarray
    lengths: np.ndarray
    columns: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """Whole sequences: `tokens` i32[B, T] right-padded, `lengths` i32[B] (prompt and response), `prompt_lengths` i32[B], `labels`
    f32[B] in {0, 1} (NaN where a row has none)."""

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    labels: np.ndarray


class Order:
    """`order[k]`: the row that stands at position k of an endless, shuffled repetition of `size` rows.

    Raises:
      UserError: no rows.
    """

    def __init__(self, size: int, seed: int, where: str = "config.task.train"):
        if size < 1:
            raise UserError("no rows", expected="at least one row to train on", where=where, fix="Give data that fits the limits")
        self.dataset = grain.MapDataset.range(size).shuffle(seed=seed % 2**32).repeat()

    def __getitem__(self, position: int) -> int:
        return int(self.dataset[position])


class PromptBatches:
    """Batches of prompts in a static shape.

    Prompts longer than `length` are left out beforehand, counted in the log; those of an endless generator, which nobody can
    measure beforehand, are refused where they occur.

    Args:
      problems: a sequence of problems (`.prompt`, `.columns`).
      length: L, tokens of a row.
      seed: of the order.
    """

    def __init__(
        self,
        problems: Sequence[Any],
        builder: SequenceBuilder,
        *,
        length: int,
        seed: int,
        where: str = "config.sampling.max_prompt",
    ):
        self.problems, self.builder, self.length, self.where = problems, builder, length, where
        self.kept = _measured(problems, lambda p: len(builder.prompt_ids(p.prompt)), length, "prompts", where)
        self.order = Order(len(problems) if self.kept is None else len(self.kept), seed)

    def batch(self, iteration: int, n: int) -> PromptBatch:
        """The n prompts of an iteration."""
        rows = [self.order[iteration * n + j] for j in range(n)]
        return self.of([self.problems[row if self.kept is None else self.kept[row]] for row in rows])

    def of(self, problems: Sequence[Any]) -> PromptBatch:
        """A batch of just these problems, in their order (for evaluation)."""
        ids = [self.builder.prompt_ids(problem.prompt) for problem in problems]
        tokens, lengths = pad(ids, self.length, self.builder.tokenizer.pad_token_id, self.where)
        return PromptBatch(list(problems), tokens, lengths, integer_columns(problems))


class SequenceBatches:
    """Batches of prompt and response, for supervised training and for training on outcome labels.

    Args:
      rows: any sequence.
      pair: (row, draw) -> (prompt, response, label or None), or None where a row has nothing to give. `draw` is the position in
        the endless order: a task may give another demonstration each time.
      length: T, tokens of a row; longer rows are left out beforehand (measured at draw 0), counted in the log.
      seed: of the order.
      where: the config key that holds the limit.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        pair: Callable[[Any, int], tuple[Prompt, str, int | None] | None],
        builder: SequenceBuilder,
        *,
        length: int,
        seed: int,
        where: str = "config.sft.max_length",
    ):
        self.rows, self.pair, self.builder, self.length, self.where = rows, pair, builder, length, where
        self.kept = None
        if isinstance(rows, (list, tuple)):
            self.kept = [index for index, row in enumerate(rows) if pair(row, 0) is not None]
            with_pair = [rows[index] for index in self.kept]
            fit = _measured(with_pair, lambda row: len(builder.encode(*pair(row, 0)[:2])[0]), length, "sequences", where)
            self.kept = [self.kept[index] for index in fit]
        self.order = Order(len(rows) if self.kept is None else len(self.kept), seed, where)

    def batch(self, iteration: int, n: int) -> SequenceBatch:
        """The n sequences of an iteration."""
        ids, prompt_lengths, labels = [], [], []
        for position in range(iteration * n, (iteration + 1) * n):
            row = self.order[position]
            prompt, response, label = self.pair(self.rows[row if self.kept is None else self.kept[row]], position)
            sequence, front = self.builder.encode(prompt, response)
            ids.append(sequence)
            prompt_lengths.append(front)
            labels.append(np.nan if label is None else label)
        tokens, lengths = pad(ids, self.length, self.builder.tokenizer.pad_token_id, self.where)
        return SequenceBatch(tokens, lengths, np.array(prompt_lengths, np.int32), np.array(labels, np.float32))


def pad(rows: Sequence[Sequence[int]], length: int, pad_id: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as (i32[R, length] right-padded, i32[R] lengths). Raises UserError where a row does not fit: nothing is cut."""
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for index, row in enumerate(rows):
        if len(row) > length:
            raise UserError(
                f"{len(row)} tokens in row {index} of a batch",
                expected=f"at most {length}",
                where=where,
                fix=f"Set {where}={len(row)} or more",
            )
        tokens[index, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def integer_columns(problems: Sequence[Any]) -> dict[str, np.ndarray]:
    """The columns that hold a 32-bit integer in every problem, as i32[P]."""

    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31

    names = [name for name in problems[0].columns if all(fits(p.columns.get(name)) for p in problems)] if problems else []
    return {name: np.array([p.columns[name] for p in problems], np.int32) for name in names}


def _measured(rows: Sequence[Any], measure: Callable[[Any], int], limit: int, what: str, where: str) -> list[int] | None:
    """The indices that fit, or None for a generator."""
    return fitting(rows, measure, limit, policy="drop", what=what, where=where) if isinstance(rows, (list, tuple)) else None
