"""The compiled PRIME step: what it computes, what it must leave alone, and on what its result must not depend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jprm.model.config import ModelConfig
from jprm.model.spec import init_params
from jprm.reward import implicit
from jprm.rl.compositions import build_advantage
from jprm.rl.kl import kl_loss
from jprm.rl.learner import Learner
from jprm.rl.rollouts import Rollouts, window
from jprm.rl.step import Batch, StepSpec, make_step, response_logps
from tests.rl.batches import pad

CFG = ModelConfig(vocab_size=19, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
N, P, G = 6, 4, 4
BETA, CLIP = 0.5, 0.2
TX = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)  # a rate in the state: another rate is no other program
ADVANTAGE = dict(process_weight=1.0, scale_floor=1e-3, contrast_only=True, whiten=True)
OUTCOME_ONLY = dict(whiten=True)
# right answers per prompt: mixed, mixed, all right, mixed, all wrong, mixed; the first four are the batch, all six an
# oversampled one
OUTCOMES = np.array([[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]], np.float32)


@functools.cache
def params(seed=0):
    """Peaked enough that log-probs differ from token to token."""
    return jax.tree.map(lambda p: 6 * p if p.ndim > 1 else p, jax.jit(init_params, static_argnums=0)(CFG, jax.random.key(seed)))


@functools.partial(jax.jit, static_argnums=(2,))
def logps(params, rollouts, size=N):
    """[R, N] log-probs of the response tokens."""
    batch = Batch(rollouts.tokens, rollouts.prompt_lengths, window(rollouts.tokens, rollouts.prompt_lengths, size), rollouts.action)
    return response_logps(params, CFG, batch)[0]


@functools.cache
def rollouts(prompts=(0, 1, 2, 3), seed=0) -> Rollouts:
    """Prompts of 1 to 4 tokens, responses of 1 to 6, drawn per prompt; the behaviour log-probs are the policy's own."""
    rows = [(p, g) for p in prompts for g in range(G)]
    lengths, prompt_lengths = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
    tokens = np.zeros((len(rows), 4 + N), np.int32)
    for r, (p, g) in enumerate(rows):
        of_prompt, of_row = np.random.default_rng([seed, p]), np.random.default_rng([seed, p, g])
        prompt_lengths[r] = n = of_prompt.integers(1, 5)
        tokens[r, :n] = of_prompt.integers(1, 19, n)
        lengths[r] = n + of_row.integers(1, N + 1)
        tokens[r, n : lengths[r]] = of_row.integers(1, 19, lengths[r] - n)
    at = np.arange(4 + N)
    action = (at >= prompt_lengths[:, None]) & (at < lengths[:, None])
    step = np.where(action, (at - prompt_lengths[:, None]) // 2, -1)
    ones = np.ones(len(rows), bool)
    found = Rollouts(*map(jnp.asarray, (tokens, lengths, prompt_lengths, action, step.astype(np.int32), np.where(action, 0, -1),
                                        np.zeros(action.shape, np.float32), OUTCOMES[list(prompts)].ravel(), ones, ones)), columns={}, group=G)
    logp = jnp.pad(logps(params(), found), ((0, 0), (0, 4)))  # from the window to positions
    index = jnp.maximum(jnp.arange(4 + N) - found.prompt_lengths[:, None], 0)
    return found.replace(behavior_logp=jnp.where(found.action, jnp.take_along_axis(logp, index, axis=1), 0.0))


def learner(seed=0, lr=1e-2):
    state = TX.init(params(seed))
    state.hyperparams["learning_rate"] = jnp.float32(lr)
    return Learner(params(seed), state)


@functools.cache
def program(spec=(), advantage=tuple(ADVANTAGE.items()), prm=True):
    form = StepSpec(**{"window": N, "prompts": P, "beta": BETA, "clip": (CLIP, CLIP), **dict(spec)})
    return jax.jit(make_step(CFG, form, build_advantage(**dict(advantage)), TX, TX if prm else None))


def step(spec={}, *, policy=None, prm=None, reference=None, batch=None, learn=True):
    """(policy, prm, ok, metrics, trace) of PRIME with these departures from the default step."""
    return program(tuple(spec.items()))(policy or learner(), prm or learner(), params() if reference is None else reference,
                                        rollouts() if batch is None else batch, jnp.bool_(learn))


def same(a, b, **tolerance):
    """Every leaf equal, to the bit unless a tolerance is given; NaN equals NaN."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **({"rtol": 0} | tolerance))


def moved(a, b):
    return any(bool((x != y).any()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def counts(role: Learner):
    return {int(x) for p, x in jax.tree_util.tree_flatten_with_path(role.opt_state)[0] if jax.tree_util.keystr(p).endswith("count")}


def mu(role: Learner):
    """Adam's first moment: after one update, a tenth of the gradient (the parameters themselves only show its sign)."""
    return role.opt_state.inner_state[0].mu


def spoilt(tree):
    """One NaN in one matrix."""
    return {**tree, "final_norm": tree["final_norm"].at[3].set(jnp.nan)}


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
    names = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/sampler_drift", "critic/advantages/max", "critic/advantages/rms",
             "critic/process_return_rms", "critic/outcome_return_rms", "critic/kept_prompts", "critic/score/mean", "prm/loss", "prm/grad_norm",
             "prm/auc", "prm/pair_accuracy", "prm/max_return", "prm/abs_sum", "response_length/mean")
    return {k: round(float(m[k]), 6) for k in names}


def test_golden_metrics():
    found = golden_run()
    assert found == pytest.approx(GOLDEN, rel=1e-4, abs=1e-5), "if the maths was meant to change, put these numbers in and say why in the commit"


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

    def loss(p):
        return program((("prm_order", "none"),))(learner(), Learner(p, ()), params(), rollouts(), jnp.bool_(True))[3]["actor/loss"]

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
    more = r.replace(tokens=pad(r.tokens, 3, 7), action=pad(r.action, 3, False), step=pad(r.step, 3, -1), turn=pad(r.turn, 3, -1),
                     behavior_logp=pad(r.behavior_logp, 3, np.nan))
    b = step({"micro_batches": 4, "prm_micro_batches": 2}, policy=learner(2), prm=learner(1), batch=more)
    same([mu(a[0]), mu(a[1])], [mu(b[0]), mu(b[1])], atol=1e-6)
    assert {k: float(v) for k, v in b[3].items()} == pytest.approx({k: float(v) for k, v in a[3].items()}, rel=1e-5, abs=1e-6, nan_ok=True)


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
        return kl_loss(logps(p, rollouts()), logps(params(), rollouts()), mask, kind="k3", aggregation="token_mean", constant=N)[0] / mask.sum()

    value, grads = jax.value_and_grad(kl)(params(2))
    same(jax.tree.map(lambda a, b: (a - b) / 0.1 / 0.5, mu(both[0]), mu(plain[0])), grads, atol=1e-5)  # mu = (1 - b1) x gradient
    assert both[3]["actor/loss"] - plain[3]["actor/loss"] == pytest.approx(0.5 * float(value), rel=1e-4)


def test_kl_in_the_reward_is_no_gradient_but_an_advantage():
    advantage = (("whiten", False),)
    plain = program((), advantage, False)(learner(2), None, None, rollouts(), jnp.bool_(True))
    found = program((("kl_coef", 0.5), ("kl_in", "reward")), advantage, False)(learner(2), None, params(), rollouts(), jnp.bool_(True))
    logp, mask = logps(params(2), rollouts()) - logps(params(), rollouts()), found[-1].rollouts.token_mask
    paid = (-0.5 * jnp.where(mask, logp, 0).sum(1)).reshape(P, G)
    loo = paid - (paid.sum(1, keepdims=True) - paid) / (G - 1)
    gap = jnp.where(mask, found[-1].advantages - plain[-1].advantages, 0)
    same(gap, jnp.where(mask, loo.reshape(-1, 1), 0), atol=2e-5)
    assert found[3]["actor/ratio"] == 1  # two forward passes by the same function


# ------------------------------------------------------------------------------------------------ numbers that are none


@pytest.mark.parametrize("where", ["reference", "prm"])
def test_a_nan_stops_both_roles_to_the_bit(where):
    given = {"reference": dict(reference=spoilt(params())), "prm": dict(prm=Learner(spoilt(params()), TX.init(params())))}[where]
    policy, prm, ok, m, _ = step(**given)
    assert not bool(ok) and m["prm/skipped"] == 1 and m["actor/skipped"] == 1
    same(policy, learner())
    same(prm, given.get("prm", learner()))
    assert counts(policy) == counts(prm) == {0}


def test_a_nan_in_the_policy_stops_what_remains():
    bad = Learner(spoilt(params()), TX.init(params()))
    policy, _, ok, m, _ = step(policy=bad)
    assert not bool(ok) and m["prm/skipped"] == 0 and m["actor/skipped"] == 1
    same(policy, bad)


def test_a_nan_between_minibatches_keeps_the_first_update_and_stops_the_rest():
    """Strided minibatches: the second of two holds the odd rows."""
    r = rollouts()
    bad = r.replace(behavior_logp=jnp.where((jnp.arange(P * G) % 2 == 1)[:, None], jnp.nan, r.behavior_logp))
    policy, _, ok, m, _ = step({"prm_order": "none", "old_logp": "behavior", "minibatches": 2}, batch=bad)
    assert counts(policy) == {1} and not bool(ok) and m["actor/skipped"] == 0.5
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(policy))


@pytest.mark.parametrize("how", ["nan", "unknown", "filler"])
def test_a_row_without_a_verdict_is_left_out(how):
    """Whatever stands in its outcome; the group goes on with the others."""
    r, row = rollouts(), jnp.arange(P * G) == 5
    bad = {"nan": r.replace(outcome=jnp.where(row, jnp.nan, r.outcome)), "unknown": r.replace(known=~row), "filler": r.replace(valid=~row)}[how]
    policy, prm, ok, m, trace = step(prm=learner(1), batch=bad)
    assert bool(ok) and m["critic/labelled"] == 11 and all(jnp.isfinite(x).all() for x in jax.tree.leaves((policy, prm)))
    assert m["critic/unknown"] == (how != "filler")
    np.testing.assert_allclose(m["critic/score/mean"], (OUTCOMES[:4].sum() - 1) / 15, rtol=1e-6)
    other = step(prm=learner(1), batch=bad.replace(outcome=jnp.where(row, 1e9, bad.outcome), known=~row))
    if how != "filler":
        same(prm, other[1])
        same(policy, other[0])


@pytest.mark.parametrize("case", ["uniform", "all invalid", "no response", "unknown"])
def test_a_batch_that_teaches_nothing_moves_nothing(case):
    r = rollouts()
    batch = {
        "uniform": r.replace(outcome=jnp.ones(P * G)),
        "all invalid": r.replace(valid=jnp.zeros(P * G, bool)),
        "no response": r.replace(lengths=r.prompt_lengths, action=jnp.zeros_like(r.action), step=jnp.full_like(r.step, -1)),
        "unknown": r.replace(known=jnp.zeros(P * G, bool)),
    }[case]
    policy, prm, ok, m, trace = step(batch=batch, prm=learner(1))
    assert bool(ok) and m["actor/loss"] == 0 and m["prm/loss"] == 0 and m["actor/empty"] == 1 and m["prm/empty"] == 1
    same((policy, prm), (learner(), learner(1)))
    assert all(jnp.isfinite(x).all() for x in (trace.advantages, trace.token_rewards))


def test_one_empty_response_among_others():
    r, row = rollouts(), (jnp.arange(P * G) == 0)
    one = r.replace(lengths=jnp.where(row, r.prompt_lengths, r.lengths), action=r.action & ~row[:, None], step=jnp.where(row[:, None], -1, r.step))
    policy, prm, ok, m, _ = step(batch=one, prm=learner(1))
    assert bool(ok) and m["response_length/empty"] == 1 and moved(policy.params, params()) and moved(prm.params, params(1))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((policy, prm)))


def test_groups_of_one_get_no_advantage():
    """Nothing to compare with: finite, and the policy stays; without the mask of uniform groups too."""
    spec = (("prompts", P * G), ("mask_uniform", False))
    r = rollouts().replace(group=1)
    advantage = tuple({**ADVANTAGE, "contrast_only": False, "whiten": False}.items())
    policy, prm, ok, m, trace = program(spec, advantage)(learner(), learner(), params(), r, jnp.bool_(True))
    assert bool(ok) and (trace.advantages == 0).all() and m["actor/grad_norm"] == 0 and moved(prm.params, params())


# ------------------------------------------------------------------------------------------------ selection


def test_an_oversampled_batch_is_the_batch_of_the_prompts_it_keeps():
    """Of six prompts the three with an accuracy in the band come first, in order; a fill-in makes four and teaches nothing."""
    spec = {"band": (0.3, 0.8)}  # right: .5 .75 1 .25 0 .25
    big = rollouts((2, 0, 4, 1, 3, 5))
    policy, prm, ok, m, trace = step(spec, prm=learner(1), batch=big)
    want = step(prm=learner(1), batch=rollouts((0, 1, 2, 4)))  # 2 and 4 have no contrast
    same([mu(policy), mu(prm)], [mu(want[0]), mu(want[1])], atol=1e-6)
    assert trace.rollouts.valid.reshape(P, G).all(axis=1).tolist() == [True, True, False, False]
    assert trace.advantages.shape == (P * G, N) and m["critic/kept_prompts"] == pytest.approx(2 / 6)
    np.testing.assert_allclose(m["critic/score/mean"], OUTCOMES.mean(), rtol=1e-6)  # of all that was sampled
