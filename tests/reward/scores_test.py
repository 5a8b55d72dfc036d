"""Scoring finished responses: the named variants and their order of candidates."""

import jax.numpy as jnp
import numpy as np
import pytest

from jprm.errors import UserError
from jprm.reward.scores import NAMES, aggregate, best_of_n, response_score, step_scores
from tests.rl.batches import spoil

# one response of three steps, [.5, -.4, .5], against one of [.1, .1, .1], and one of no steps at all
Q = np.array([[0.5, -0.4, 0.5], [0.1, 0.1, 0.1], [0, 0, 0]], np.float32)
MASK = np.array([[1, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
STEP = np.where(MASK, np.arange(3), -1)
SCORES = {
    "single_min": (-0.4, 0.1),
    "single_sum": (0.6, 0.3),
    "single_mean": (0.2, 0.1),
    "single_last": (0.5, 0.1),
    "accumulative_min": (0.1, 0.1),
    "accumulative_sum": (1.2, 0.6),
    "accumulative_mean": (0.4, 0.2),
    "accumulative_last": (0.6, 0.3),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beta", [1.0, 0.05])
def test_every_name(name, beta):
    got = response_score(spoil(Q, MASK), MASK, STEP, 4, beta, name)
    np.testing.assert_allclose(got[:2], beta * np.array(SCORES[name]), rtol=1e-5)
    assert got[2] == -np.inf


def test_names_rank_oppositely():
    by = {name: int(best_of_n(response_score(Q[:2], MASK[:2], STEP[:2], 3, 1.0, name), 2)[0]) for name in NAMES}
    assert by["single_min"] == 1 and by["accumulative_sum"] == 0 and by["accumulative_last"] == by["single_sum"] == 0


def test_steps_of_several_tokens():
    q = np.array([[-0.4, 0.2, -0.3, -0.1]], np.float32)
    step, mask = np.array([[0, 0, 1, 1]]), np.ones((1, 4), bool)
    np.testing.assert_allclose(step_scores(q, mask, step, 3, 1.0, "single")[0], [[-0.2, -0.4, 0]], atol=1e-6)
    scores, exists = step_scores(q, mask, step, 3, 1.0, "accumulative")
    np.testing.assert_allclose(scores, [[-0.2, -0.6, 0]], atol=1e-6)
    assert exists.tolist() == [[True, True, False]]


def test_explicit_scores_with_garbage_off_the_mask():
    scores = jnp.array([[0.9, jnp.nan, 0.2], [jnp.nan, jnp.inf, -jnp.inf]])
    exists = jnp.array([[1, 0, 1], [0, 0, 0]], bool)
    got = [aggregate(scores, exists, how).tolist() for how in ("min", "sum", "mean", "last")]
    np.testing.assert_allclose(got, [[x, -np.inf] for x in (0.2, 1.1, 0.55, 0.2)], rtol=1e-6)
    assert aggregate(jnp.zeros((2, 0)), jnp.zeros((2, 0), bool), "min").tolist() == [-np.inf] * 2


def test_first_among_equals():
    assert best_of_n(jnp.array([1.0, 2, 2, -jnp.inf, -jnp.inf, -jnp.inf]), 3).tolist() == [1, 0]


@pytest.mark.parametrize(
    "call, found",
    [
        (lambda: response_score(Q, MASK, STEP, 3, 1.0, "min"), "'min'"),
        (lambda: step_scores(Q, MASK, STEP, 3, 1.0, "total"), "'total'"),
        (lambda: aggregate(Q, MASK, "prod"), "'prod'"),
    ],
    ids=["name", "kind", "how"],
)
def test_unknown_names(call, found):
    with pytest.raises(UserError) as error:
        call()
    assert found in error.value.found and error.value.expected and error.value.where and error.value.fix
