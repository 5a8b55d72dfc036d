"""Reward-to-go and potentials, against plain loops; seen to fail without the `where` before the scan (NaN cases)."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprm.rl.compositions import build_advantage
from jprm.rl.credit import (
    difference,
    group_prior,
    potential_differences,
    prefix_success,
    prefix_sum,
    suffix_sum,
    suffix_sums,
    suffix_sums_reference,
)
from jprm.rl.signal import signal
from tests.rl.batches import GOLDEN_MASK, GOLDEN_Q, golden

NAN = float("nan")
CASES = {
    "plain": ([1.0, 0.0, 2.0], [1, 1, 1], 1.0),
    "discounted": ([1.0, 0.0, 2.0], [1, 1, 1], 0.5),
    "gamma 0": ([1.0, 3.0, 2.0], [1, 1, 1], 0.0),
    "padding holds NaN": ([1.0, 2.0, NAN], [1, 1, 0], 0.9),
    "padding holds NaN, undiscounted": ([1.0, 2.0, NAN], [1, 1, 0], 1.0),
    "hole in the middle": ([1.0, 7.0, 2.0], [1, 0, 1], 0.9),
    "one unit": ([3.0], [1], 0.3),
    "nothing": ([5.0, 5.0], [0, 0], 1.0),
    "no units at all": ([], [], 0.9),
}


@pytest.mark.parametrize("rewards, mask, gamma", CASES.values(), ids=CASES)
def test_suffix_sums_match_reference(rewards, mask, gamma):
    got = suffix_sums(jnp.array([rewards], jnp.float32), jnp.array([mask], bool), gamma)[0]
    np.testing.assert_allclose(got, suffix_sums_reference(rewards, mask, gamma), rtol=1e-6)


def test_reverse_cumulative_sums_of_the_golden_batch():
    got = suffix_sums(GOLDEN_Q, GOLDEN_MASK)
    want = [[0.4, 0.2, 0.3, 0], [0.6, 0.1, 0, 0], [-0.6, -0.2, -0.4, -0.1], [0.6, 0, 0, 0]]
    np.testing.assert_allclose(got, want, atol=1e-6)


POTENTIALS = {  # potential, mask, gamma, start, rewards
    "plain": ([1.0, 3.0, 2.0], [1, 1, 1], 1.0, 0.0, [1, 2, -1]),
    "start": ([1.0, 3.0], [1, 1], 1.0, 0.5, [0.5, 2]),
    "discounted": ([1.0, 3.0], [1, 1], 0.5, 0.0, [0.5, 0.5]),
    "hole is stepped over": ([1.0, NAN, 3.0, NAN], [1, 0, 1, 0], 1.0, 0.0, [1, 0, 2, 0]),
    "hole first": ([NAN, 4.0], [0, 1], 1.0, 1.0, [0, 3]),
    "nothing": ([NAN], [0], 1.0, 0.0, [0]),
    "no units at all": ([], [], 1.0, 0.0, []),
}


@pytest.mark.parametrize("potential, mask, gamma, start, want", POTENTIALS.values(), ids=POTENTIALS)
def test_potential_differences(potential, mask, gamma, start, want):
    got = potential_differences(jnp.array([potential], jnp.float32), jnp.array([mask], bool), gamma, start)[0]
    np.testing.assert_allclose(got, want, atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.7, 1.0]))
def test_identities(seed, gamma):
    rng = np.random.default_rng(seed)
    mask = jnp.asarray(rng.random((4, 7)) < 0.7)
    r = signal(jnp.asarray(rng.normal(size=(4, 7)), jnp.float32), mask, "token")
    rollouts = golden()
    prefix = prefix_sum()(r, rollouts)
    np.testing.assert_allclose(difference()(prefix, rollouts).value, r.value, atol=1e-5)  # r_t = Q_t - Q_{t-1}
    # reward-to-go is the total minus the prefix before
    to_go = suffix_sum()(r, rollouts).value
    want = jnp.where(mask, r.value.sum(1, keepdims=True) - (jnp.cumsum(r.value, 1) - r.value), 0)
    np.testing.assert_allclose(to_go, want, atol=1e-5)
    for row in range(4):
        want = suffix_sums_reference(r.value[row].tolist(), mask[row].tolist(), gamma)
        np.testing.assert_allclose(suffix_sum(gamma)(r, rollouts).value[row], want, atol=1e-5)


# ------------------------------------------------------------------------------------------------ the PRM as a critic


def test_a_prefix_moves_the_prior_by_its_log_odds():
    """p_0 = 1/4, r = [.2, -.1]: V = [1/4, sigma(ln(1/3) + .2)], by hand in float64."""
    got = prefix_success(jnp.array([[0.2, -0.1]]), jnp.array([0.25]))
    np.testing.assert_allclose(got, [[0.25, 1 / (1 + 3 * np.exp(-0.2))]], rtol=1e-6)


def test_the_prior_of_a_row_does_not_know_its_own_outcome():
    row = golden()
    flipped = row.replace(outcome=row.outcome.at[0].set(1 - row.outcome[0]))
    assert group_prior(row)[0] == group_prior(flipped)[0]
    assert group_prior(row)[1] != group_prior(flipped)[1]
    # o = 1, 0, 1, 0
    np.testing.assert_allclose(group_prior(row), [(1 + 0.5) / 4, (2 + 0.5) / 4, (1 + 0.5) / 4, (2 + 0.5) / 4], rtol=1e-6)


def test_the_advantage_of_a_critic_is_the_outcome_minus_the_value_before_the_token():
    """Golden batch, beta = 1: row 0 has o = 1, others' mean 1/3, prior 3/8, Q = [.2, .1, .4]."""
    rollouts = golden()
    advantages, returns, _ = build_advantage(estimator="rloo", process_weight=1.0, process_credit="baseline")(rollouts, GOLDEN_Q)
    value = lambda before: 1 / (1 + (5 / 3) * np.exp(-before))
    np.testing.assert_allclose(returns["process"][0, :3], 0.375 - value(np.array([0.0, 0.2, 0.1])), atol=1e-6)
    np.testing.assert_allclose(advantages[0, :3], 2 / 3 + 0.375 - value(np.array([0.0, 0.2, 0.1])), atol=1e-6)


def test_a_critic_costs_no_direction():
    """Its credit at a token depends on the prefix only: changing the rewards from token k on changes nothing up to and with k."""
    rollouts, f = golden(), build_advantage(process_weight=1.0, process_credit="baseline")
    before, after = f(rollouts, GOLDEN_Q)[0], f(rollouts, GOLDEN_Q + np.array([0, 3, 3, 3], np.float32))[0]
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert np.abs(before[:, 2:] - after[:, 2:]).max() > 0.1
