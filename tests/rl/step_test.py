"""The compiled PRIME step: what it computes, what it must leave alone, and on what its result must not depend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.reward import implicit
from jprm.rl.kl import kl_loss
from jprm.rl.learner import Learner
from jprm.rl.rollouts import window
from tests.rl.batches import pad
from tests.rl.step_rig import (
    BETA,
    OUTCOME_ONLY,
    G,
    N,
    P,
    counts,
    learner,
    logps,
    moved,
    mu,
    params,
    program,
    rollouts,
    same,
    step,
)

# ------------------------------------------------------------------------------------------------ the first iteration


@pytest.fixture(scope="module")
def first():
    """Policy, PRM and reference are all the same parameters."""
    return step()


def test_the_ratio_is_exactly_one_and_the_kl_exactly_zero(first):
    _, _, ok, m, _ = first
    assert bool(ok) and m["actor/ratio"] == 1 and m["actor/approx_kl"] == 0 and m["actor/clip_fraction"] == 0


def test_a_prm_equal_to_its_reference_rewards_nothing(first):
    *_, m, trace = first
    assert (trace.token_rewards == 0).all() and (trace.process_returns == 0).all() and m["prm/max_return"] == 0
    assert m["prm/abs_sum"] == 0 and m["prm/accuracy"] == 0.5 and m["prm/auc"] == 0.5
    np.testing.assert_allclose(m["prm/loss"], np.log(2), rtol=1e-6)


def test_both_roles_move_and_the_frozen_one_is_not_returned(first):
    policy, prm, *_ = first
    assert moved(policy.params, params()) and moved(prm.params, params()) and moved(policy.params, prm.params)
    assert counts(policy) == counts(prm) == {1}


def test_the_trainer_agrees_with_the_sampler(first):
    assert first[3]["actor/sampler_drift"] < 1e-6
    off = rollouts().replace(behavior_logp=rollouts().behavior_logp - 0.25)
    np.testing.assert_allclose(step(batch=off)[3]["actor/sampler_drift"], 0.25, rtol=1e-5)


# A PRM and a policy that are not their reference. Where the maths of the step changes on purpose: print(golden_run()).
GOLDEN = {
    "actor/loss": 0.0,
    "actor/grad_norm": 1.919084,
    "actor/entropy": 2.859318,
    "actor/sampler_drift": 0.469121,
    "critic/advantages/max": 1.700786,
    "critic/advantages/rms": 0.990338,
    "critic/process_return_rms": 0.490153,
    "critic/outcome_return_rms": 0.607995,
    "critic/kept_prompts": 0.75,
    "critic/score/mean": 0.625,
    "prm/loss": 0.844673,
    "prm/grad_norm": 4.458344,
    "prm/auc": 0.266667,
    "prm/pair_accuracy": 0.5,
    "prm/max_return": 1.839968,
    "prm/abs_sum": 1.153231,
    "response_length/mean": 4.1875,
}


def golden_run():
    """Numbers of one step in which nothing is trivially zero."""
    _, _, _, m, _ = step(policy=learner(2), prm=learner(1))
    names = (
        "actor/loss",
        "actor/grad_norm",
        "actor/entropy",
        "actor/sampler_drift",
        "critic/advantages/max",
        "critic/advantages/rms",
        "critic/process_return_rms",
        "critic/outcome_return_rms",
        "critic/kept_prompts",
        "critic/score/mean",
        "prm/loss",
        "prm/grad_norm",
        "prm/auc",
        "prm/pair_accuracy",
        "prm/max_return",
        "prm/abs_sum",
        "response_length/mean",
    )
    return {k: round(float(m[k]), 6) for k in names}


def test_golden_metrics():
    found = golden_run()
    assert found == pytest.approx(GOLDEN, rel=1e-4, abs=1e-5), (
        "if the maths was meant to change, put these numbers in and say why in the commit"
    )


# ------------------------------------------------------------------------------------------------ rewards: after, before, none


def test_rewards_are_beta_times_the_log_ratio_before_the_update():
    *_, trace = step(prm=learner(1))
    kept = rollouts().valid & (jnp.arange(P * G) // G != 2)
    q = implicit.log_ratio(logps(params(1), rollouts()), logps(params(), rollouts()), trace.rollouts.action)
    same(trace.token_rewards, BETA * q, atol=2e-6)
    assert (trace.rollouts.valid == kept).all()  # the prompt without contrast is out


def test_before_scores_with_the_updated_prm():
    *_, trace = step({"prm_order": "before"}, prm=learner(1))
    updated = step(prm=learner(1))[1]
    same(step({"prm_order": "before"}, prm=learner(1))[1].params, updated.params, atol=1e-6)
    q = implicit.log_ratio(logps(updated.params, rollouts()), logps(params(), rollouts()), trace.rollouts.action)
    same(trace.token_rewards, BETA * q, atol=5e-6)


def test_with_a_learning_rate_of_zero_the_order_makes_no_difference():
    a, b = step(prm=learner(1, lr=0)), step({"prm_order": "before"}, prm=learner(1, lr=0))
    same(a[0].params, b[0].params, atol=1e-6)
    same(a[-1].token_rewards, b[-1].token_rewards, atol=1e-6)
    assert not moved(a[1].params, params(1))


def test_the_policy_does_not_see_how_fast_the_prm_learns():
    a, b = step(prm=learner(1)), step(prm=learner(1, lr=0.5))
    same(a[0], b[0])
    assert moved(a[1].params, b[1].params)


def test_the_policy_sees_the_prm_only_as_rewards():
    """d(policy loss)/d(PRM) = 0, and rewards do reach the advantages."""
    given = (params(), rollouts(), jnp.bool_(True))
    policy = learner()

    def loss(p):
        return program((("prm_order", "none"),))(policy, Learner(p, ()), *given)[3]["actor/loss"]

    assert all((g == 0).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params(1))))
    assert moved(step(prm=learner(1))[0].params, step(prm=learner(3))[0].params)


def test_a_frozen_prm_and_the_sampler_s_log_probs():
    spec = {"prm_order": "none", "old_logp": "behavior", "minibatches": 2}
    policy, prm, ok, m, trace = step(spec, prm=learner(1))
    same(prm, learner(1))
    assert counts(policy) == {2} and bool(ok) and "prm/grad_norm" not in m and (trace.token_rewards != 0).any()
    off = rollouts().replace(behavior_logp=rollouts().behavior_logp - 0.1)
    assert step(spec, policy=learner(lr=0), batch=off)[3]["actor/ratio"] == pytest.approx(np.exp(0.1), rel=1e-5)


# ------------------------------------------------------------------------------------------------ what must not matter


def test_micro_batches_and_padding_change_nothing():
    a = step(policy=learner(2), prm=learner(1))
    r = rollouts()
    more = r.replace(
        tokens=pad(r.tokens, 3, 7),
        action=pad(r.action, 3, False),
        step=pad(r.step, 3, -1),
        turn=pad(r.turn, 3, -1),
        behavior_logp=pad(r.behavior_logp, 3, np.nan),
    )
    b = step({"micro_batches": 4, "prm_micro_batches": 2}, policy=learner(2), prm=learner(1), batch=more)
    same([mu(a[0]), mu(a[1])], [mu(b[0]), mu(b[1])], atol=1e-6)
    assert {k: float(v) for k, v in b[3].items()} == pytest.approx(
        {k: float(v) for k, v in a[3].items()}, rel=1e-5, abs=1e-6, nan_ok=True
    )


def test_the_order_of_prompts_changes_nothing():
    a, b = step(policy=learner(2), prm=learner(1)), step(policy=learner(2), prm=learner(1), batch=rollouts((3, 1, 0, 2)))
    same([mu(a[0]), mu(a[1])], [mu(b[0]), mu(b[1])], atol=1e-6)


def test_epochs_and_minibatches_count_updates():
    policy, prm, ok, m, _ = step({"epochs": 2, "minibatches": 2, "prm_minibatches": 4})
    assert counts(policy) == {4} and counts(prm) == {4} and bool(ok)
    assert m["actor/ratio"] != 1 and m["actor/approx_kl"] > 0 and m["actor/sampler_drift"] < 1e-6


# ------------------------------------------------------------------------------------------------ outcome only, warm-up, KL


def test_outcome_only_is_prime_without_process_weight(first):
    plain = program((), tuple(OUTCOME_ONLY.items()), False)(learner(), None, None, rollouts(), jnp.bool_(True))
    beside = program((), tuple(OUTCOME_ONLY.items()), True)(learner(), learner(1), params(), rollouts(), jnp.bool_(True))
    same(mu(plain[0]), mu(beside[0]), atol=1e-7)
    assert plain[1] is None and moved(beside[1].params, params(1)) and not [k for k in plain[3] if k.startswith("prm/")]
    same(mu(plain[0]), mu(first[0]), atol=1e-6)  # rewards of exactly 0 add nothing


def test_a_warm_up_leaves_the_policy_alone():
    policy, prm, ok, m, _ = step(learn=False)
    same(policy, learner())
    assert moved(prm.params, params()) and counts(prm) == {1} and bool(ok)


def test_kl_in_the_loss_adds_the_kl_gradient():
    advantage = tuple(OUTCOME_ONLY.items())
    run = lambda coef: program((("kl_coef", coef),), advantage, False)(learner(2), None, params(), rollouts(), jnp.bool_(True))
    plain = program((), advantage, False)(learner(2), None, None, rollouts(), jnp.bool_(True))
    both, mask = run(0.5), rollouts().action & (jnp.arange(P * G) // G != 2)[:, None]
    mask = window(mask, rollouts().prompt_lengths, N, False)

    def kl(p):
        return (
            kl_loss(logps(p, rollouts()), logps(params(), rollouts()), mask, kind="k3", aggregation="token_mean", constant=N)[0]
            / mask.sum()
        )

    value, grads = jax.value_and_grad(kl)(params(2))
    same(jax.tree.map(lambda a, b: (a - b) / 0.1 / 0.5, mu(both[0]), mu(plain[0])), grads, atol=1e-5)  # mu = (1 - b1) x gradient
    assert both[3]["actor/loss"] - plain[3]["actor/loss"] == pytest.approx(0.5 * float(value), rel=1e-4)


def test_kl_in_the_reward_is_no_gradient_but_an_advantage():
    advantage = (("whiten", False),)
    plain = program((), advantage, False)(learner(2), None, None, rollouts(), jnp.bool_(True))
    found = program((("kl_coef", 0.5), ("kl_in", "reward")), advantage, False)(
        learner(2), None, params(), rollouts(), jnp.bool_(True)
    )
    logp, mask = logps(params(2), rollouts()) - logps(params(), rollouts()), found[-1].rollouts.token_mask
    paid = (-0.5 * jnp.where(mask, logp, 0).sum(1)).reshape(P, G)
    loo = paid - (paid.sum(1, keepdims=True) - paid) / (G - 1)
    gap = jnp.where(mask, found[-1].advantages - plain[-1].advantages, 0)
    same(gap, jnp.where(mask, loo.reshape(-1, 1), 0), atol=2e-5)
    assert found[3]["actor/ratio"] == 1  # two forward passes by the same function
