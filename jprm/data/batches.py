"""Batches as pure functions of (seed, iteration): one integer is the whole state of the data.

An order is a Grain dataset that is indexed, never iterated: shuffled, repeated for ever, shuffled anew in each epoch. Batch i
takes the elements i*n .. (i+1)*n - 1 of it, on any number of hosts and after any resume.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grain
import numpy as np

from jprm.data.sequence import Prompt, SequenceBuilder, fitting
from jprm.errors import UserError

log = logging.getLogger(__name__)

LOOKED_AT = 100  # rows of a generator that are measured beforehand
TRIES = 10_000  # rows of a generator that are drawn for one position before it is given up
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts for rollouts: `tokens` i32[P, L] right-padded, `lengths` i32[P], the problems behind them, and their integer
    columns as i32[P] (for verifiers on the device).

    rows: numbers of the problems in their sequence; passed_over: how many that did not fit were drawn before these.
    """

    problems: list[Any]
    tokens: np.ndarray
    lengths: np.ndarray
    columns: dict[str, np.ndarray]
    rows: list[int]
    passed_over: int = 0


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """Whole sequences: `tokens` i32[B, T] right-padded, `lengths` i32[B] (prompt and response), `prompt_lengths` i32[B], `labels`
    f32[B] in {0, 1} (NaN where a row has none); `rows` and `passed_over` as of prompts."""

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    labels: np.ndarray
    rows: list[int]
    passed_over: int = 0


class Order:
    """`order[k]`: the row that stands at position k of an endless, shuffled repetition of `size` rows.

    Raises:
      UserError: no rows.
    """

    def __init__(self, size: int, seed: int, where: str = "config.task.train"):
        if size < 1:
            raise UserError("no rows", expected="at least one row to train on", where=where, fix="Give data that fits the limits")
        self.size = size
        self.dataset = grain.MapDataset.range(size).shuffle(seed=seed % 2**32).repeat()

    def __getitem__(self, position: int) -> int:
        return int(self.dataset[position])


class PromptBatches:
    """Batches of prompts in a static shape.

    Prompts longer than `length` are left out beforehand, counted in the log. Those of a generator cannot all be measured: a look
    at the first says how many do not fit, and where one is drawn the next that fits stands in for it, counted in its batch.

    Args:
      problems: a sequence of problems (`.prompt`, `.columns`).
      length: L, tokens of a row.
      seed: of the order.

    Raises:
      UserError: there is no prompt that fits.
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
        self.generated = _generated(problems)
        self.kept = _kept(problems, lambda problem: len(builder.prompt_ids(problem.prompt)), length, "prompts", where)
        self.order = Order(len(self.kept), seed)

    def batch(self, iteration: int, n: int) -> PromptBatch:
        """The n prompts of an iteration."""

        def encode(row: int, position: int) -> tuple[Any, list[int]] | None:
            problem = self.problems[row]
            ids = self.builder.prompt_ids(problem.prompt)
            return (problem, ids) if len(ids) <= self.length else None

        rows, found, passed_over = _drawn(self, iteration, n, encode)
        return self._packed([problem for problem, _ in found], [ids for _, ids in found], rows, passed_over)

    def of(self, problems: Sequence[Any]) -> PromptBatch:
        """A batch of just these problems, in their order (for evaluation). Raises UserError where one does not fit."""
        ids = [self.builder.prompt_ids(problem.prompt) for problem in problems]
        return self._packed(list(problems), ids, [problem.index for problem in problems], 0)

    def _packed(self, problems: list[Any], ids: list[list[int]], rows: list[int], passed_over: int) -> PromptBatch:
        tokens, lengths = pad(ids, self.length, self.builder.tokenizer.pad_token_id, self.where)
        return PromptBatch(problems, tokens, lengths, integer_columns(problems), rows, passed_over)


class SequenceBatches:
    """Batches of prompt and response, for supervised training and for training on outcome labels.

    Args:
      rows: any sequence.
      pair: (row, draw) -> (prompt, response, label or None), or None where a row has nothing to give. `draw` is the position in
        the endless order: a task may give another demonstration each time.
      length: T, tokens of a row. Longer rows, and those without a pair, are left out beforehand (measured at draw 0), counted in
        the log; those of a generator where they are drawn, as in :class:`PromptBatches`.
      seed: of the order.
      where: the config key that holds the limit.

    Raises:
      UserError: there is no row that fits.
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
        self.generated = _generated(rows)

        def measure(row: Any) -> int | None:
            found = pair(row, 0)
            return None if found is None else len(builder.encode(*found[:2])[0])

        self.kept = _kept(rows, measure, length, "sequences", where)
        self.order = Order(len(self.kept), seed, where)

    def batch(self, iteration: int, n: int) -> SequenceBatch:
        """The n sequences of an iteration."""

        def encode(row: int, position: int) -> tuple[list[int], int, float] | None:
            found = self.pair(self.rows[row], position)
            if found is None:
                return None
            prompt, response, label = found
            ids, front = self.builder.encode(prompt, response)
            return (ids, front, np.nan if label is None else label) if len(ids) <= self.length else None

        rows, found, passed_over = _drawn(self, iteration, n, encode)
        ids, prompt_lengths, labels = zip(*found)
        tokens, lengths = pad(ids, self.length, self.builder.tokenizer.pad_token_id, self.where)
        front = np.array(prompt_lengths, np.int32)
        return SequenceBatch(tokens, lengths, front, np.array(labels, np.float32), rows, passed_over)


def _drawn(
    batches: PromptBatches | SequenceBatches, iteration: int, n: int, encode: Callable[[int, int], Found | None]
) -> tuple[list[int], list[Found], int]:
    """(numbers of the rows, what `encode` gives for them, rows passed over) of an iteration.

    `encode`: (row, position in the order) -> None where the row does not fit: the next by its number then stands in for it, so
    that what stands at a position depends on the position alone. Of a generator's rows one is as good as another.
    """
    rows, kept, passed_over = [], [], 0
    size = batches.order.size
    for position in range(iteration * n, (iteration + 1) * n):
        first = batches.order[position]
        for step in range(min(size, TRIES)):
            row = batches.kept[(first + step) % size]
            if (found := encode(row, position)) is not None:
                break
        else:
            raise UserError(
                f"none of {min(size, TRIES)} rows in a row fits",
                expected=f"some of at most {batches.length} tokens",
                where=batches.where,
                fix=f"Raise {batches.where}",
            )
        rows.append(row)
        kept.append(found)
        passed_over += step
    if passed_over:
        log.info("%d generated rows passed over for more than %s = %d tokens", passed_over, batches.where, batches.length)
    return rows, kept, passed_over


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


def _generated(rows: Sequence[Any]) -> bool:
    """Whether rows are made on access: then there may be any number of them, and measuring all may take any time."""
    return not isinstance(rows, (list, tuple))


def _kept(rows: Sequence[Any], measure: Callable[[Any], int | None], limit: int, what: str, where: str) -> Sequence[int]:
    """The numbers of the rows that fit; all of a generator's, of which the first LOOKED_AT are measured for the log.

    `measure` gives None for a row that has nothing to measure, which is left out.

    Raises:
      UserError: none fits, or none of those looked at.
    """
    generated = _generated(rows)
    looked_at = range(min(len(rows), LOOKED_AT) if generated else len(rows))
    lengths = {i: length for i in looked_at if (length := measure(rows[i])) is not None}
    numbers, what = list(lengths), f"generated {what}" if generated else what
    found = fitting(numbers, lengths.__getitem__, limit, policy="drop", what=what, where=where)
    return range(len(rows)) if generated else [numbers[i] for i in found]
