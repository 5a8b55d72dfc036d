"""The clipped surrogate and its aggregations, by golden values and by what must not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprm.errors import UserError
from jprm.rl.policy_loss import AGGREGATIONS, aggregate, policy_loss
from tests.rl.batches import pad, random_rollouts, spoil

# two rows of 2 and 4 tokens, ratios [1.4, 1] and [.5, 1, 1, 1.6], advantages 1 and -1
MASK = np.arange(4) < np.array([[2], [4]])
OLD = np.log(np.array([[0.5, 0.4, 1, 1], [0.2, 0.3, 0.6, 0.5]]))
NEW = np.log(np.array([[0.7, 0.4, 1, 1], [0.1, 0.3, 0.6, 0.8]]))
ADVANTAGES = np.array([[1.0], [-1.0]]) * np.ones((2, 4))

GOLDEN = {  # options: in the order of AGGREGATIONS
    "symmetric": ({}, [0.36666667, 0, 1.1, 0.275]),
    "higher": ({"clip_high": 0.28}, [0.35333333, -0.02, 1.06, 0.265]),
    "dual": ({"dual_clip": 1.5}, [0.35, -0.0125, 1.05, 0.2625]),
}


@pytest.mark.parametrize("options, want", GOLDEN.values(), ids=GOLDEN)
def test_golden(options, want):
    got = []
    for aggregation in AGGREGATIONS:
        total, weight, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, aggregation=aggregation, constant=4, **options)
        got.append(total / weight)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_clip_higher_and_dual_by_token():
    logp, advantages = jnp.log(jnp.array([[0.7, 0.9, 1.5, 4.0]])), jnp.array([[1.0, -1, 1, -1]])
    mask = jnp.ones((1, 4), bool)
    total = [float(policy_loss(logp, 0 * logp, advantages, mask, clip_high=0.28, dual_clip=c)[0]) for c in (None, 3.0)]
    np.testing.assert_allclose(total, [-0.7 + 0.9 - 1.28 + 4, -0.7 + 0.9 - 1.28 + 3], rtol=1e-6)


def test_metrics():
    _, _, metrics = policy_loss(NEW, OLD, ADVANTAGES, MASK, dual_clip=1.5, entropy_RxT=np.where(MASK, 2.0, np.nan))
    ratio = np.array([1.4, 1, 0.5, 1, 1, 1.6])
    want = {
        "clip_fraction": 2 / 6,  # 1.4 with A > 0 and .5 with A < 0; 1.6 with A < 0 is not clipped
        "dual_clip_fraction": 1 / 6,
        "approx_kl": np.mean(ratio - 1 - np.log(ratio)),
        "ratio": ratio.mean(),
        "entropy": 2.0,
    }
    assert metrics.keys() == want.keys()
    for name, (total, weight) in metrics.items():
        np.testing.assert_allclose(total / weight, want[name], rtol=1e-5, err_msg=name)


def test_token_mean_is_not_the_mean_of_micro_means():
    values, mask = np.array([[1.0, 1, 1, 1], [3, 0, 0, 0]]), np.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
    parts = [aggregate(values[i : i + 1], mask[i : i + 1]) for i in range(2)]
    assert float(sum(s for s, _ in parts) / sum(w for _, w in parts)) == pytest.approx(1.4)
    assert np.mean([float(s / w) for s, w in parts]) == pytest.approx(2.0)  # what must not be formed


def test_entropy_bonus():
    entropy = jnp.where(MASK, 2.0, jnp.nan)
    plain, with_bonus = (policy_loss(NEW, OLD, ADVANTAGES, MASK, entropy_RxT=entropy, entropy_coef=c)[0] for c in (0.0, 0.1))
    assert float(plain - with_bonus) == pytest.approx(0.1 * 2.0 * 6, rel=1e-5)


def test_gradient_by_hand_and_zero_beyond_the_clip():
    gradient = jax.grad(lambda x: policy_loss(x, OLD, ADVANTAGES, MASK)[0])(jnp.asarray(NEW, jnp.float32))
    # d(-rho A)/d logp = -rho A where free; 0 where the clip is active
    np.testing.assert_allclose(gradient, [[0, -1, 0, 0], [0, 1, 1, 1.6]], atol=1e-6)


def test_on_policy_ratio_is_exactly_one_and_still_has_gradient():
    logp = jnp.asarray(NEW, jnp.float32)
    value, gradient = jax.value_and_grad(lambda x: policy_loss(x, jax.lax.stop_gradient(x), ADVANTAGES, MASK)[0])(logp)
    ratio, n = policy_loss(logp, logp, ADVANTAGES, MASK)[2]["ratio"]
    assert float(ratio) == float(n) == 6
    assert float(value) == -2 + 4
    np.testing.assert_allclose(gradient, np.where(MASK, -ADVANTAGES, 0), atol=1e-7)


def test_extreme_ratios_are_finite():
    logp, mask = jnp.array([[500.0, -500.0]]), jnp.ones((1, 2), bool)
    value, gradient = jax.value_and_grad(lambda x: policy_loss(x, 0 * logp, -jnp.ones((1, 2)), mask)[0])(logp)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_no_gradient_to_old_or_advantages():
    old, advantages = (jax.grad(lambda a, b: policy_loss(NEW, a, b, MASK)[0], argnums=i)(OLD, ADVANTAGES) for i in (0, 1))
    assert not np.any(old) and not np.any(advantages)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_invariances(aggregation, seed):
    """Garbage and more padding, row order and micro-batches change neither value nor gradient."""
    rollouts, advantages, logp, _ = random_rollouts(seed, 2, 4, 6)
    mask, old = np.asarray(rollouts.token_mask), logp - 0.3 * advantages[::-1]

    def f(logp, old, advantages, mask):
        def loss(x):
            total, weight, metrics = policy_loss(
                x,
                old,
                advantages,
                mask,
                clip_high=0.28,
                dual_clip=3.0,
                aggregation=aggregation,
                constant=6,
                entropy_RxT=x,
                entropy_coef=0.01,
            )
            return total, (weight, metrics)

        (total, (weight, metrics)), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logp))
        return (total, weight, metrics), gradient

    (want, gradient) = f(logp, old, advantages, mask)
    close = lambda a, b: jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b)  # noqa: E731

    spoilt, spoilt_gradient = f(*(pad(spoil(x, mask), 3, np.nan) for x in (logp, old, advantages)), pad(mask, 3, False))
    close(spoilt, want)
    close(spoilt_gradient[:, :6], gradient)
    assert not np.any(spoilt_gradient[:, 6:])

    order = np.random.default_rng(seed).permutation(8)
    permuted, permuted_gradient = f(logp[order], old[order], advantages[order], mask[order])
    close(permuted, want)
    close(permuted_gradient, gradient[order])

    parts = [f(*(x[i : i + 2] for x in (logp, old, advantages, mask))) for i in range(0, 8, 2)]
    close(jax.tree.map(lambda *x: sum(x), *[p[0] for p in parts]), want)
    close(jnp.concatenate([p[1] for p in parts]), gradient)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_all_masked_is_zero_with_finite_gradient(aggregation):
    def loss(x):
        total, weight, _ = policy_loss(x, OLD, ADVANTAGES, np.zeros_like(MASK), aggregation=aggregation, constant=4)
        return total / jnp.maximum(weight, 1)

    value, gradient = jax.value_and_grad(loss)(jnp.full((2, 4), jnp.nan))
    assert float(value) == 0 and not np.any(gradient)


@pytest.mark.parametrize("options, found", [({"aggregation": "mean"}, "'mean'"), ({"aggregation": "constant"}, "constant=None")])
def test_errors(options, found):
    with pytest.raises(UserError) as error:
        policy_loss(NEW, OLD, ADVANTAGES, MASK, **options)
    assert found in error.value.found and error.value.where.startswith("config.rl") and error.value.expected and error.value.fix
