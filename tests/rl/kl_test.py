"""KL estimators: values at a point, expectations, and what their gradients really are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.errors import UserError
from jprm.rl.kl import KINDS, kl_estimate, kl_loss, kl_rewards
from jprm.rl.policy_loss import AGGREGATIONS

POINTS = {0.5: (0.5, 0.125, 0.106531), -0.5: (-0.5, 0.125, 0.148721), 2.0: (2.0, 2.0, 1.135335)}
PI, REF = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
ONE = jnp.ones((1, 1), bool)


@pytest.mark.parametrize("d, want", POINTS.items(), ids=map(str, POINTS))
def test_values(d, want):
    got = [float(kl_estimate(jnp.array([[d]]), jnp.zeros((1, 1)), ONE, kind)[0, 0]) for kind in KINDS]
    np.testing.assert_allclose(got, want, atol=1e-6)


EXPECTED = {  # mean value, mean gradient on the logits, over samples from pi
    "k1": (0.085122826, [0, 0, 0]),
    "k2": (0.080088, [0.175945, -0.098118, -0.077827]),  # the gradient of KL(pi || ref)
    "k3": (0.085123, [0.2, -0.1, -0.1]),  # pi - ref: the gradient of KL(ref || pi)
}


@pytest.mark.parametrize("kind, value, gradient", [(k, *v) for k, v in EXPECTED.items()], ids=EXPECTED)
def test_expectations_under_the_policy(kind, value, gradient):
    def loss(logits):
        per_token = kl_estimate(jax.nn.log_softmax(logits)[None], jnp.log(REF)[None], jnp.ones((1, 3), bool), kind)
        return jnp.sum(jnp.asarray(PI) * per_token)  # weights are constants: these are samples, not part of the graph

    got = jax.value_and_grad(loss)(jnp.log(jnp.asarray(PI, jnp.float32)))
    np.testing.assert_allclose(got[0], value, atol=1e-6)
    np.testing.assert_allclose(got[1], gradient, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_reference(kind):
    mask = jnp.array([[True, True, False]])
    logp, ref = jnp.array([[-1.0, -2.0, jnp.nan]]), jnp.array([[-1.5, -1.0, jnp.inf]])
    for i in (0, 1):
        gradient = jax.grad(lambda a, b: kl_loss(a, b, mask, kind=kind)[0], argnums=i)(logp, ref)
        assert np.isfinite(gradient).all() and gradient[0, 2] == 0
        assert np.any(gradient) == (i == 0)
    rewards = kl_rewards(logp, ref, mask, coef=0.1, kind=kind)
    np.testing.assert_allclose(rewards, -0.1 * kl_estimate(logp, ref, mask, kind))
    assert not np.any(jax.grad(lambda a: kl_rewards(a, ref, mask, coef=0.1, kind=kind).sum())(logp))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_adds_up_over_micro_batches(aggregation):
    rng = np.random.default_rng(0)
    logp, ref = rng.normal(size=(2, 4, 5))
    mask = rng.random((4, 5)) < 0.6
    total, weight, metrics = kl_loss(logp, ref, mask, aggregation=aggregation, constant=5)
    parts = [kl_loss(logp[i : i + 1], ref[i : i + 1], mask[i : i + 1], aggregation=aggregation, constant=5) for i in range(4)]
    np.testing.assert_allclose([sum(p[0] for p in parts), sum(p[1] for p in parts)], [total, weight], rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"][0], (logp - ref)[mask].sum(), rtol=1e-5)


def test_huge_ratios_are_finite():
    value, gradient = jax.value_and_grad(lambda x: kl_loss(x, jnp.zeros((1, 1)), ONE, kind="k3")[0])(jnp.array([[-300.0]]))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_unknown_kind():
    with pytest.raises(UserError) as error:
        kl_estimate(jnp.zeros((1, 1)), jnp.zeros((1, 1)), ONE, "k4")
    assert (
        "'k4'" in error.value.found
        and "k1, k2, k3" in error.value.expected
        and error.value.where == "config.rl.kl_kind"
        and error.value.fix
    )
