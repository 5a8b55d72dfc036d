"""Terms, places and channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.reward.steps import at_tokens, last_tokens, sum_by_step
from jprm.rl.credit import suffix_sum
from jprm.rl.normalise import norm
from jprm.rl.signal import advantage, apply, channel, column, keep, lift, outcome, signal, to_steps, total
from tests.rl.batches import make_rollouts, spoil

# four responses of 3, 2, 3 and 3 steps
STEP = np.array([[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, -1], [0, 0, 1, 1, 1, 2], [0, 1, 1, 2, -1, -1]])
MASK = STEP >= 0
SCORES = np.array([[0.9, 0.8, 0.95], [0.7, 0.9, np.nan], [0.9, 0.4, 0.2], [0.3, 0.85, 0.6]], np.float32)
STEP_MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]])


@pytest.fixture(scope="module")
def rollouts():
    columns = {"score": jnp.asarray(SCORES), "exists": jnp.asarray(STEP_MASK), "token": jnp.asarray(spoil(np.ones((4, 6)), MASK))}
    return make_rollouts(MASK, [1, 1, 0, 0], 4, step=STEP, columns=columns)


def test_values_are_zero_off_the_mask():
    s = signal(jnp.array([1.0, jnp.nan]), jnp.array([True, False]), "row")
    assert s.value.tolist() == [1, 0] and s.with_value(jnp.array([jnp.inf, jnp.inf])).value.tolist() == [jnp.inf, 0]


def test_terms(rollouts):
    assert outcome(rollouts.replace(known=jnp.array([1, 0, 1, 1], bool))).mask.tolist() == [True, False, True, True]
    assert column("token", "token")(rollouts).value.sum() == MASK.sum()
    masked = column("score", "step", mask="exists")(rollouts.replace(valid=jnp.array([1, 1, 1, 0], bool)))
    np.testing.assert_allclose(masked.value.sum(1), [2.65, 1.6, 1.5, 0], rtol=1e-6)


LIFTS = {  # support, how, row 1 (five tokens in steps of 3 and 2)
    "row all": ("row", "all", [10, 10, 10, 10, 10, 0]),
    "row end": ("row", "end", [0, 0, 0, 0, 10, 0]),
    "row mean": ("row", "mean", [2, 2, 2, 2, 2, 0]),
    "step all": ("step", "all", [6, 6, 6, 8, 8, 0]),
    "step end": ("step", "end", [0, 0, 6, 0, 8, 0]),
    "step mean": ("step", "mean", [2, 2, 2, 4, 4, 0]),
    "turn all": ("turn", "all", [6, 6, 6, 6, 6, 0]),
    "token all": ("token", "all", [1, 2, 3, 4, 5, 0]),
}


@pytest.mark.parametrize("support, how, want", LIFTS.values(), ids=LIFTS)
def test_lift(rollouts, support, how, want):
    value = {"row": jnp.full(4, 10.0), "token": jnp.arange(1.0, 7) * jnp.ones((4, 1))}.get(support, jnp.array([[6.0, 8, 9]] * 4))
    s = signal(value, rollouts.token_mask if support == "token" else jnp.ones(value.shape, bool), support)
    got = lift(how)(s, rollouts)
    assert got.support == "token"
    np.testing.assert_allclose(got.value[1], want)


def test_steps_sum_and_never_mean(rollouts):
    s = to_steps(3)(signal(jnp.asarray(spoil(np.ones((4, 6)), MASK)), MASK, "token"), rollouts)
    np.testing.assert_array_equal(s.value, [[2, 2, 2], [3, 2, 0], [2, 3, 1], [1, 2, 1]])
    np.testing.assert_array_equal(s.mask, STEP_MASK)


def test_steps_helpers_ignore_garbage():
    x = jnp.array([[-0.4, 0.2, -0.3, -0.1, np.nan]])
    step, mask = jnp.array([[0, 0, 1, 1, 1]]), jnp.array([[1, 1, 1, 1, 0]], bool)
    sums, exists = sum_by_step(x, step, mask, 3)
    np.testing.assert_allclose(sums, [[-0.2, -0.4, 0]], atol=1e-7)
    assert exists.tolist() == [[True, True, False]]
    gradient = jax.grad(lambda x: sum_by_step(x, step, mask, 3)[0][0, 1])(x)
    assert gradient.tolist() == [[0, 0, 1, 1, 0]]
    np.testing.assert_allclose(at_tokens(jnp.array([[1.0, 2, np.nan]]), jnp.array([[0, -1, 1]])), [[1, 0, 2]])
    holes = jnp.array([[0, 0, -1, 0, 1, 2, 2, -1]])
    assert last_tokens(holes, holes >= 0).tolist() == [[False, False, False, True, True, False, True, False]]


@pytest.mark.parametrize("key, want", [("row", 3), ("unit", 2), ("group", 6), ("batch", 12)])
def test_totals(key, want):
    x = jnp.ones((4, 3))
    got = total(x, key, 2)
    assert jnp.broadcast_to(got, x.shape).shape == x.shape and (got == want).all()


def test_process_supervised_grpo(rollouts):
    compute = advantage([channel("process", column("score", "step", mask="exists"), norm(), suffix_sum())])
    got, _ = compute(rollouts)
    want = [
        [2.250869, 1.438525, 0.998506],
        [0.880039, 0.812344, 0],
        [-2.030859, -2.843203, -1.793926],
        [-1.100049, 0.321553, -0.304629],
    ]
    np.testing.assert_allclose(got, np.where(MASK, np.take_along_axis(np.array(want), np.maximum(STEP, 0), 1), 0), atol=2e-5)


def test_channels_add_with_their_weights(rollouts):
    one = channel("one", outcome, apply(lambda x: x + 1), weight=2.0)
    two = channel("two", outcome, keep(lambda r: r.outcome > 0.5), lift("end"), weight=jnp.float32(10))
    got, sources = advantage([one, two])(rollouts)
    last = np.eye(6)[[5, 4, 5, 3]] * np.array([[1], [1], [0], [0]])
    np.testing.assert_allclose(sources["one"], MASK * np.array([[2], [2], [1], [1]]))
    np.testing.assert_allclose(sources["two"], last)
    np.testing.assert_allclose(got, 2 * np.asarray(sources["one"]) + 10 * last)


def test_filler_rows_get_nothing(rollouts):
    got, _ = advantage([channel("one", outcome)])(rollouts.replace(valid=jnp.array([1, 0, 1, 1], bool)))
    assert not got[1].any() and got[0].any()
