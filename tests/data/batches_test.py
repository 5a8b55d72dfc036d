"""Batches: a pure function of (seed, iteration), in a static shape."""

import re
import types
from collections.abc import Sequence

import numpy as np
import pytest

from jprm.data.batches import Order, PromptBatches, SequenceBatches, integer_columns, pad
from jprm.data.schemas import Pair
from jprm.data.sequence import SequenceBuilder
from jprm.errors import UserError
from jprm.tasks.arithmetic import arithmetic_task, make_tokenizer


@pytest.fixture(scope="module")
def task():
    return arithmetic_task({"train_size": 500})


@pytest.fixture(scope="module")
def builder():
    return SequenceBuilder(make_tokenizer())


def test_every_epoch_holds_every_row_once_in_another_order():
    order = Order(7, seed=3)
    epochs = [[order[e * 7 + k] for k in range(7)] for e in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert [Order(7, seed=3)[k] for k in (20, 5, 0)] == [order[k] for k in (20, 5, 0)]
    assert [Order(7, seed=4)[k] for k in range(7)] != epochs[0]
    assert [Order(1, seed=2**40)[k] for k in range(3)] == [0, 0, 0]


def test_prompt_batches_are_a_function_of_seed_and_iteration(task, builder):
    one, two, other = (PromptBatches(task.train, builder, length=16, seed=s) for s in (1, 1, 2))
    late = one.batch(1000, 8)
    one.batch(0, 8)
    again = two.batch(1000, 8)
    np.testing.assert_array_equal(late.tokens, again.tokens)
    assert late.problems == again.problems != other.batch(1000, 8).problems
    # positions count rows, so two iterations of 4 are one of 8
    halves = [two.batch(2000, 4), two.batch(2001, 4)]
    assert halves[0].problems + halves[1].problems == late.problems


def test_prompt_batch_contents(task, builder):
    batch = PromptBatches(task.train, builder, length=16, seed=0).batch(3, 5)
    assert batch.tokens.shape == (5, 16) and batch.tokens.dtype == batch.lengths.dtype == np.int32
    for problem, row, length in zip(batch.problems, batch.tokens, batch.lengths):
        assert builder.tokenizer.decode(row[:length]) == problem.prompt
        assert (row[length:] == builder.tokenizer.pad_token_id).all()
    assert batch.columns["answer"].tolist() == [int(p.answer) for p in batch.problems]
    assert batch.columns["answer"].dtype == np.int32


class Generated(Sequence):
    """Prompts of 1 to 8 characters or some more, made on access; those ``missing`` have nothing to imitate."""

    def __init__(self, size=1000, shortest=1, missing=()):
        self.size, self.shortest, self.missing = size, shortest, missing

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        length = self.shortest + index * 2654435761 % 97 % 8
        return types.SimpleNamespace(index=index, prompt="1" * length, columns={})

    def pair(self, problem, draw):
        return None if problem.index in self.missing else (problem.prompt, "#1", None)


def test_long_prompts_are_left_out_of_lists(builder):
    problems = [types.SimpleNamespace(prompt="1" * n, columns={}) for n in range(1, 9)]
    batches = PromptBatches(problems, builder, length=4, seed=0)
    assert {len(p.prompt) for i in range(4) for p in batches.batch(i, 2).problems} == {1, 2, 3, 4}


def test_generated_prompts_that_do_not_fit_are_passed_over_and_counted(builder, caplog):
    caplog.set_level("INFO")
    problems = Generated()
    batches = PromptBatches(problems, builder, length=4, seed=0)
    assert re.search(r"generated prompts: \d+ of 100 dropped for more than 4 tokens \(the longest has 8\)", caplog.text)
    whole = PromptBatches(problems, builder, length=8, seed=0)  # where every prompt fits
    assert whole.batch(0, 32).passed_over == 0
    expected, passed_over = [], 0
    for row in whole.batch(0, 32).rows:
        while len(problems[row].prompt) > 4:
            row, passed_over = (row + 1) % len(problems), passed_over + 1
        expected.append(row)
    batch = batches.batch(0, 32)
    assert batch.rows == expected == [problem.index for problem in batch.problems]
    assert batch.passed_over == passed_over > 8 and batch.lengths.max() == 4
    assert f"{passed_over} generated rows passed over for more than config.sampling.max_prompt = 4 tokens" in caplog.text
    # what stands at a position depends on nothing but the position
    late = PromptBatches(problems, builder, length=4, seed=0).batch(7, 4)
    assert late.rows == expected[28:] and late.tokens.tolist() == batch.tokens[28:].tolist()


def test_generated_sequences_that_do_not_fit_are_passed_over_and_counted(builder):
    problems = Generated(missing=range(0, 1000, 3))
    batches = SequenceBatches(problems, problems.pair, builder, length=8, seed=0)
    batch = batches.batch(1, 32)
    assert batch.passed_over > 8 and batch.lengths.max() == 8 and not {row % 3 for row in batch.rows} - {1, 2}
    assert [len(problems[row].prompt) for row in batch.rows] == batch.prompt_lengths.tolist()
    halves = [batches.batch(i, 16) for i in (2, 3)]
    assert halves[0].rows + halves[1].rows == batch.rows and sum(h.passed_over for h in halves) == batch.passed_over


def test_a_generator_of_nothing_that_fits_is_refused(builder):
    problems = Generated(shortest=5)
    for make, where in (
        (lambda: PromptBatches(problems, builder, length=4, seed=0), "config.sampling.max_prompt"),
        (lambda: SequenceBatches(problems, problems.pair, builder, length=7, seed=0), "config.sft.max_length"),
    ):
        with pytest.raises(UserError) as error:
            make()
        e = error.value
        assert e.found.startswith("100 of 100 generated ") and "too long" in e.found and e.expected.startswith("at most ")
        assert e.where == where and e.fix.startswith(f"Set {where}=1")


def test_demonstrations_change_with_the_draw(task, builder):
    def pair(problem, draw):
        return problem.prompt, task.demonstration(problem, draw), None

    batches = SequenceBatches([task.train[0]], pair, builder, length=64, seed=0)
    batch = batches.batch(2, 16)
    assert len({row.tobytes() for row in batch.tokens}) > 2 and np.isnan(batch.labels).all()
    np.testing.assert_array_equal(batch.tokens, batches.batch(2, 16).tokens)
    assert batch.tokens.shape == (16, 64) and (batch.tokens[np.arange(16), batch.lengths - 1] == builder.end_id).all()
    assert (batch.prompt_lengths == len(task.train[0].prompt)).all()


def test_labelled_rows_keep_their_labels(builder):
    rows = [Pair("1=", "#1", 1), Pair("2=", "#1", 0), Pair("3=", "#" + "1" * 40, 1)]
    batches = SequenceBatches(rows, lambda row, draw: (row.prompt, row.response, row.label), builder, length=8, seed=0)
    batch = batches.batch(0, 4)
    assert batch.labels.dtype == np.float32 and sorted(batch.labels.tolist()) == [0, 0, 1, 1]  # the third is too long
    for row, length, label in zip(batch.tokens, batch.lengths, batch.labels):
        assert builder.decode_response(row[:length]) == {1.0: "1=#1", 0.0: "2=#1"}[label]


def test_rows_without_a_demonstration_are_left_out(builder):
    def pair(row, draw):
        return None if row == "2=" else (row, "#1", None)

    batch = SequenceBatches(["1=", "2=", "3="], pair, builder, length=8, seed=0).batch(0, 8)
    assert {builder.decode_response(row[:2]) for row in batch.tokens} == {"1=", "3="}
    with pytest.raises(UserError) as error:
        SequenceBatches(["2="], pair, builder, length=8, seed=0)
    assert error.value.found == "no rows" and error.value.where == "config.sft.max_length"


def test_pad_cuts_nothing():
    tokens, lengths = pad([[1, 2], []], 3, 9, "config.x")
    assert tokens.tolist() == [[1, 2, 9], [9, 9, 9]] and lengths.tolist() == [2, 0]
    with pytest.raises(UserError) as error:
        pad([[1] * 4], 3, 9, "config.x")
    assert error.value.found == "4 tokens in row 0 of a batch" and error.value.fix == "Set config.x=4 or more"


def test_integer_columns():
    rows = [{"a": 1, "b": "x", "c": True, "d": 2**40}, {"a": 2, "b": "x", "c": True, "d": 2**40, "e": 1}]
    problems = [types.SimpleNamespace(columns=row) for row in rows]
    assert list(integer_columns(problems)) == ["a"] and integer_columns([]) == {}
