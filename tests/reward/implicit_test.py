"""The implicit PRM: rewards, the loss on outcomes, and whether it ranks; golden values and what must not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprm.reward.implicit import (
    auc,
    balanced_weights,
    ce_loss,
    log_ratio,
    outcome_rewards,
    pair_accuracy,
    step_rewards,
    token_rewards,
    usable_rows,
)
from tests.rl.batches import GOLDEN_MASK, GOLDEN_OUTCOME, GOLDEN_Q, pad, random_rollouts, spoil

ALL = np.ones(4, bool)
CE = {  # beta: loss per row, mean, gradient at every token of a row
    0.05: ([0.683197, 0.70826, 0.70826, 0.70826], 0.70199405, [-0.006188, 0.006344, -0.006344, 0.006344]),
    1.0: ([0.513015, 1.037488, 1.037488, 1.037488], 0.90636978, [-0.100328, 0.161414, -0.161414, 0.161414]),
}


@pytest.mark.parametrize("beta", CE)
def test_cross_entropy_golden(beta):
    rows, mean, gradient = CE[beta]
    each = [ce_loss(*(x[i : i + 1] for x in (GOLDEN_Q, GOLDEN_MASK, GOLDEN_OUTCOME, ALL)), beta=beta)[0] for i in range(4)]
    np.testing.assert_allclose(each, rows, atol=1e-6)
    total, weight, _ = ce_loss(GOLDEN_Q, GOLDEN_MASK, GOLDEN_OUTCOME, ALL, beta=beta)
    assert float(total / weight) == pytest.approx(mean, abs=1e-6) and float(weight) == 4
    got = jax.grad(lambda q: ce_loss(q, GOLDEN_MASK, GOLDEN_OUTCOME, ALL, beta=beta)[0] / 4)(jnp.asarray(GOLDEN_Q))
    np.testing.assert_allclose(got, GOLDEN_MASK * np.array(gradient)[:, None], atol=1e-6)


def test_confidently_wrong_rows_still_learn():
    q, mask = jnp.array([[-120.0]]), np.ones((1, 1), bool)
    value, gradient = jax.value_and_grad(lambda q: ce_loss(q, mask, np.ones(1), np.ones(1, bool), beta=1.0)[0])(q)
    assert float(value) == 120.0 and float(gradient[0, 0]) == -1.0


def test_prefix_and_step_rewards_golden():
    np.testing.assert_allclose(np.cumsum(token_rewards(GOLDEN_Q, GOLDEN_MASK, 1.0)[2]), [-0.4, -0.2, -0.5, -0.6], atol=1e-6)
    step = np.array([[0, 0, 1, 1]] * 4)
    sums, exists = step_rewards(GOLDEN_Q, GOLDEN_MASK, step, 3, 0.5)
    np.testing.assert_allclose(sums[2], [-0.1, -0.2, 0], atol=1e-6)
    assert exists.tolist() == [[True, True, False], [True, False, False], [True, True, False], [True, False, False]]


def test_soft_value_of_a_prefix_is_exact():
    """Q_t = beta log E_ref[exp(r / beta) | prefix], whatever the PRM is; beta .5, a first token and three continuations."""
    beta, first = 0.5, np.log(0.5 / 0.2)
    pi, ref = np.array([0.1, 0.6, 0.3]), np.array([0.3, 0.3, 0.4])
    q = np.stack([np.full(3, first), np.log(pi / ref)], axis=1)
    mask = np.ones((3, 2), bool)
    reward = np.asarray(outcome_rewards(q, mask, beta))
    assert float(token_rewards(q, mask, beta)[0, 0]) == pytest.approx(0.45814537, abs=1e-6)
    assert beta * np.log((ref * np.exp(reward / beta)).sum()) == pytest.approx(0.45814537, abs=1e-6)
    assert (ref * reward).sum() == pytest.approx(0.33978919, abs=1e-6)
    assert (pi * reward).sum() == pytest.approx(0.56800659, abs=1e-6)


def test_a_prm_equal_to_its_reference_is_silent():
    logp = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)) - 12, jnp.float32)
    q = log_ratio(logp, logp, GOLDEN_MASK)
    assert not np.any(q) and not np.any(token_rewards(q, GOLDEN_MASK, 0.05))
    gradient = jax.grad(lambda x: ce_loss(log_ratio(x, logp, GOLDEN_MASK), GOLDEN_MASK, GOLDEN_OUTCOME, ALL, beta=0.05)[0])(logp)
    np.testing.assert_allclose(gradient, GOLDEN_MASK * np.where(GOLDEN_OUTCOME, -0.025, 0.025)[:, None], rtol=1e-6)  # and learns


def test_gradient_reaches_the_prm_only():
    """d(PRM loss)/d(reference) = 0 and != 0 to the PRM, also when the reference is the policy in training; rewards carry none."""
    rng = np.random.default_rng(0)
    prm, ref = jnp.asarray(rng.normal(size=(2, 4, 4)), jnp.float32)

    def loss(prm, ref):
        return ce_loss(log_ratio(prm, ref, GOLDEN_MASK), GOLDEN_MASK, GOLDEN_OUTCOME, ALL, beta=1.0)[0]

    to_prm, to_ref = jax.grad(loss, argnums=(0, 1))(prm, ref)
    assert (np.asarray(to_prm) != 0)[GOLDEN_MASK].all() and not np.any(to_ref)
    assert not np.any(jax.grad(lambda x: token_rewards(log_ratio(x, ref, GOLDEN_MASK), GOLDEN_MASK, 1.0).sum())(prm))


def test_unusable_rows_are_excluded_and_counted():
    outcome = np.array([1, np.nan, 1, 0], np.float32)
    known = np.array([1, 1, 0, 1], bool)
    mask = GOLDEN_MASK & np.array([[1], [1], [1], [0]], bool)  # the last row has no token
    assert usable_rows(mask, outcome, known).tolist() == [True, False, False, False]
    f = lambda q: ce_loss(q, mask, outcome, known, beta=1.0, row_weight=jnp.array([2.0, jnp.nan, 1, 1]))  # noqa: E731
    total, weight, metrics = f(GOLDEN_Q)
    assert float(total) == pytest.approx(2 * 0.513015, abs=1e-5) and float(weight) == 2.0
    assert [float(x) for x in metrics["excluded"]] == [3, 4]
    gradient = jax.grad(lambda q: f(q)[0])(jnp.asarray(GOLDEN_Q))
    assert np.isfinite(gradient).all() and not np.any(gradient[1:]) and np.any(gradient[0])


@pytest.mark.parametrize("known", [True, False])
def test_nothing_to_learn_from_is_finite(known):
    f = lambda q: ce_loss(q, np.zeros((4, 4), bool), np.full(4, np.nan), np.full(4, known), beta=1.0)[:2]  # noqa: E731
    (total, weight), gradient = f(GOLDEN_Q), jax.grad(lambda q: f(q)[0])(jnp.full((4, 4), jnp.nan))
    assert float(total) == float(weight) == 0 and not np.any(gradient)
    assert not np.any(balanced_weights(np.full(4, np.nan, np.float32), np.zeros(4, bool)))


def test_soft_labels_and_clipping():
    q, mask = jnp.array([[0.4]] * 3), np.ones((3, 1), bool)
    loss = [float(ce_loss(q[:1], mask[:1], np.array([o]), ALL[:1], beta=1.0)[0]) for o in (1.0, 0.0, 0.25, 3.0, -1.0)]
    assert loss[2] == pytest.approx(0.25 * loss[0] + 0.75 * loss[1]) and loss[3:] == loss[:2]


BALANCE = {  # outcomes, usable, weights
    "one in four": ([1, 0, 0, 0], "1111", [2, 2 / 3, 2 / 3, 2 / 3]),
    "even": ([1, 0, 1, 0], "1111", [1, 1, 1, 1]),
    "excluded rows": ([1, 0, 0, 1], "1110", [1.5, 0.75, 0.75, 0]),
    "one class": ([1, 1, 1, 1], "1111", [0.5] * 4),
    "soft": ([0.5, 0.5, 1, 0], "1111", [1, 1, 1, 1]),
}


@pytest.mark.parametrize("outcome, usable, want", BALANCE.values(), ids=BALANCE)
def test_balanced_weights(outcome, usable, want):
    got = balanced_weights(jnp.array(outcome, jnp.float32), jnp.array([c == "1" for c in usable]))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_ranking_golden():
    score = GOLDEN_Q.sum(1)
    assert [float(x) for x in pair_accuracy(score, GOLDEN_OUTCOME, ALL, 4)] == [0.0, 4.0]
    hit, n = ce_loss(GOLDEN_Q, GOLDEN_MASK, GOLDEN_OUTCOME, ALL, beta=1.0)[2]["accuracy"]
    assert float(hit / n) == 0.25
    total, n = ce_loss(GOLDEN_Q, GOLDEN_MASK, GOLDEN_OUTCOME, ALL, beta=1.0)[2]["abs_sum"]
    assert float(total / n) == pytest.approx((0.4 + 0.6 + 0.6 + 0.6) / 4)


RANKING = {  # scores, outcomes, usable, group, auc, pair accuracy (sums and weights)
    "perfect": ([2, 1, 3, 0], [1, 0, 1, 0], "1111", 2, (4, 4), (2, 2)),
    "ties count half": ([1, 1, 0, 1], [1, 0, 1, 0], "1111", 2, (1, 4), (0.5, 2)),
    "prompts differ in difficulty": ([5, 6, 1, 2], [1, 1, 0, 1], "1111", 2, (3, 3), (1, 1)),
    "one class": ([1, 2, 3, 4], [1, 1, 1, 1], "1111", 2, (0, 0), (0, 0)),
    "unusable NaN": ([2, np.nan, 1, 0], [1, 1, 0, np.nan], "1010", 2, (1, 1), (0, 0)),
}


@pytest.mark.parametrize("score, outcome, usable, group, area, pairs", RANKING.values(), ids=RANKING)
def test_ranking(score, outcome, usable, group, area, pairs):
    arrays = jnp.array(score, jnp.float32), jnp.array(outcome, jnp.float32), jnp.array([c == "1" for c in usable])
    assert tuple(map(float, auc(*arrays))) == area
    assert tuple(map(float, pair_accuracy(*arrays, group))) == pairs


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_invariances(seed):
    """Garbage and more padding, row order and micro-batches (with whole-batch class weights) change neither loss nor gradient."""
    rollouts, q, _, _ = random_rollouts(seed, 2, 4, 6)
    mask, outcome, known = (np.asarray(x) for x in (rollouts.token_mask, rollouts.outcome, rollouts.known))
    weights = np.asarray(balanced_weights(outcome, usable_rows(mask, outcome, known)))

    def f(q, mask, outcome, known, weights):
        def loss(q):
            total, weight, metrics = ce_loss(q, mask, outcome, known, beta=0.5, row_weight=weights)
            return total, (total, weight, metrics)

        (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(q))
        return values, gradient

    close = lambda a, b: jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b)  # noqa: E731
    want, gradient = f(q, mask, outcome, known, weights)

    garbage = spoil(outcome, known)
    assert np.allclose(balanced_weights(garbage, usable_rows(mask, garbage, known)), weights)
    spoilt, spoilt_gradient = f(pad(spoil(q, mask), 3, np.nan), pad(mask, 3, False), garbage, known, weights)
    close(spoilt, want)
    close(spoilt_gradient[:, :6], gradient)
    assert not np.any(spoilt_gradient[:, 6:])

    order = np.random.default_rng(seed).permutation(8)
    permuted, permuted_gradient = f(*(x[order] for x in (q, mask, outcome, known, weights)))
    close(permuted, want)
    close(permuted_gradient, gradient[order])

    parts = [f(*(x[i : i + 2] for x in (q, mask, outcome, known, weights))) for i in range(0, 8, 2)]
    close(jax.tree.map(lambda *x: sum(x), *[p[0] for p in parts]), want)
    close(jnp.concatenate([p[1] for p in parts]), gradient)
