"""Windows, groups and steps of rollouts."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprm.errors import UserError
from jprm.model.decode import Samples
from jprm.rl.rollouts import from_samples, grouped, step_ids, to_window, window
from tests.rl.batches import random_rollouts

SEPARATOR, EOS = 9, 2
IS_SEPARATOR = jnp.arange(10) == SEPARATOR
IS_STOP = jnp.arange(10) == EOS


# name: tokens, action, S, with stop ids, steps, merged
STEPS = {
    "plain": ([5, 9, 6, 7, 9, 8, 8], "1111111", 4, False, [0, 0, 1, 1, 1, 2, 2], 0),
    "eos alone joins the step before": ([5, 9, 6, 9, 2, 0], "111110", 4, True, [0, 0, 1, 1, 1, -1], 0),
    "eos after text stays": ([5, 9, 6, 2], "1111", 4, True, [0, 0, 1, 1], 0),
    "any single last token without stop ids": ([5, 9, 6], "111", 4, False, [0, 0, 0], 0),
    "single last token that is no stop id": ([5, 9, 6], "111", 4, True, [0, 0, 1], 0),
    "only eos": ([2, 0], "10", 4, True, [0, -1], 0),
    "separator then eos": ([9, 2, 2, 2], "1100", 4, True, [0, 0, -1, -1], 0),
    "separators in a row": ([9, 9, 5, 9], "1111", 4, False, [0, 1, 2, 2], 0),
    "merged beyond S": ([9, 9, 5, 9, 5, 5], "111111", 2, False, [0, 1, 1, 1, 1, 1], 2),
    "exactly S": ([5, 9, 5, 9], "1111", 2, False, [0, 0, 1, 1], 0),
    "prompt and tool output end nothing": ([9, 5, 9, 9, 6, 9, 2], "0100111", 4, True, [-1, 0, -1, -1, 0, 0, 0], 0),
    "eos after tool output": ([5, 9, 7, 7, 2], "11001", 4, True, [0, 0, -1, -1, 0], 0),
    "nothing": ([9, 9], "00", 4, False, [-1, -1], 0),
}


@pytest.mark.parametrize("tokens, action, max_steps, stops, steps, merged", STEPS.values(), ids=STEPS)
def test_step_ids(tokens, action, max_steps, stops, steps, merged):
    mask = jnp.array([[c == "1" for c in action]])
    got, swallowed = step_ids(jnp.array([tokens]), mask, IS_SEPARATOR, max_steps, IS_STOP if stops else None)
    assert got[0].tolist() == steps
    assert swallowed.tolist() == [merged]


def test_window_is_the_response():
    x = jnp.arange(12).reshape(2, 6)
    assert window(x, jnp.array([1, 4]), 3, fill=-7).tolist() == [[1, 2, 3], [10, 11, -7]]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 9))
def test_window_is_the_response_at_any_place(seed, size):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 8)).astype(np.float32)
    prompts = rng.integers(0, 8, 3)
    got = np.asarray(window(jnp.asarray(x), jnp.asarray(prompts), size))
    for row, taken, prompt in zip(x, got, prompts):
        response = row[prompt : prompt + size]
        np.testing.assert_array_equal(taken, np.pad(response, (0, size - len(response))))


def test_to_window_cuts_every_token_array():
    rollouts, q, _, mask = random_rollouts(0, 2, 3, 9, prompt_length=3)
    rollouts = rollouts.replace(columns={"q": jnp.asarray(q), "per_row": jnp.arange(6.0)})
    cut = to_window(rollouts, 6)
    np.testing.assert_array_equal(cut.action, mask[:, 3:])
    np.testing.assert_array_equal(cut.step, rollouts.step[:, 3:])
    np.testing.assert_array_equal(cut.columns["q"], q[:, 3:])
    np.testing.assert_array_equal(cut.columns["per_row"], np.arange(6.0))
    np.testing.assert_array_equal(cut.action, np.arange(6) < np.asarray(cut.lengths)[:, None])
    assert not cut.prompt_lengths.any()


def test_rollouts_from_samples():
    """Two prompts of two responses: what was sampled is an action and has a step, also where a response is empty or unstopped."""
    samples = Samples(
        tokens=jnp.array([[4, 5, 9, 6, 2, 0], [4, 5, 6, 6, 9, 6], [4, 2, 0, 0, 0, 0], [4, 9, 0, 0, 0, 0]]),
        prompt_lengths=jnp.array([2, 2, 1, 2]),
        lengths=jnp.array([5, 6, 2, 2]),
        logp=jnp.arange(24.0).reshape(4, 6),
        stopped=jnp.array([True, False, True, True]),
    )
    outcome, known = jnp.array([1.0, 0, 0, 1]), jnp.array([1, 1, 0, 1], bool)
    same = dict(group=2, is_separator_V=IS_SEPARATOR)
    got = from_samples(samples, outcome, known, max_steps=4, is_stop_V=IS_STOP, **same)
    steps = [[-1, -1, 0, 1, 1, -1], [-1, -1, 0, 0, 0, 1], [-1, 0, -1, -1, -1, -1], [-1] * 6]
    assert got.step.tolist() == steps and (got.action == (got.step >= 0)).all()
    assert got.turn.tolist() == np.where(np.array(steps) < 0, -1, 0).tolist() and got.group == 2
    assert got.labelled.tolist() == [True, True, False, True] and got.valid.all()
    for name, value in dict(tokens=samples.tokens, lengths=samples.lengths, behavior_logp=samples.logp, outcome=outcome).items():
        np.testing.assert_array_equal(getattr(got, name), value)
    assert from_samples(samples, outcome, known, max_steps=1, **same).columns["merged_steps"].tolist() == [1, 0, 0, 0]


def test_groups_are_prompt_major():
    x = jnp.arange(6)
    assert grouped(x, 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_rows_that_do_not_divide():
    with pytest.raises(UserError) as error:
        grouped(jnp.arange(7), 3)
    assert "7 rows" in error.value.found and error.value.where == "rollouts.group" and error.value.expected and error.value.fix


def test_nan_outcomes_are_no_labels():
    rollouts, *_ = random_rollouts(1, 1, 4, 3)
    rollouts = rollouts.replace(
        outcome=jnp.array([1.0, jnp.nan, jnp.inf, 0.0]), known=jnp.array([1, 1, 1, 0], bool), valid=jnp.ones(4, bool)
    )
    assert rollouts.labelled.tolist() == [True, False, False, False]
