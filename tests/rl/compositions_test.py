"""The advantage the step calls: PRIME's golden values, and the properties that every composition must have.

Seen to fail: `tile` for `repeat` in a group sum (equivariance), the paper's bracket for the code's (golden), `where` dropped in
`signal` (garbage), `stop_gradient` dropped (gradient).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprm.errors import UserError
from jprm.reward.implicit import log_ratio, token_rewards
from jprm.reward.steps import last_tokens
from jprm.rl.compositions import build_advantage
from jprm.rl.policy_loss import policy_loss
from tests.rl.batches import GOLDEN_MASK, GOLDEN_Q, golden, make_rollouts, pad, pad_rollouts, random_rollouts, spoil

# ------------------------------------------------------------------------------------------------ golden values

PAPER = [
    [0.083334, 0.166667, 0.75, 0],
    [-0.314815, -0.824074, 0, 0],
    [-2.629624, -1.388885, -1.148145, -0.074073],
    [0.175925, 0, 0, 0],
]
CODE = [
    [0.083334, 0.129631, 0.842592, 0],
    [-0.314815, -0.935185, 0, 0],
    [-2.629624, -1.249997, -1.203701, -0.046295],
    [0.175925, 0, 0, 0],
]
WHITENED = [
    [0.597601, 0.643855, 1.356166, 0],
    [0.199815, -0.419987, 0, 0],
    [-2.112879, -0.734512, -0.688258, 0.46809],
    [0.690107, 0, 0, 0],
]
CODE_GAMMA = [
    [-0.545462, -0.554629, 0.175926, 0],
    [0.378703, -0.268518, 0, 0],
    [-2.878541, -1.66546, -1.799071, -0.712962],
    [0.842591, 0, 0, 0],
]
RLOO = np.array([2 / 3, -2 / 3, 2 / 3, -2 / 3])


def prime(**options):
    return build_advantage(estimator="rloo", process_weight=1.0, **options)


def test_prime_as_the_paper_writes_it():
    advantages, returns, _ = prime(formula="paper")(golden(), GOLDEN_Q)
    np.testing.assert_allclose(advantages, PAPER, atol=2e-6)
    np.testing.assert_allclose(returns["outcome"], GOLDEN_MASK * RLOO[:, None], atol=2e-6)
    np.testing.assert_allclose(returns["process"] + returns["outcome"], advantages, atol=1e-6)


def test_prime_as_the_code_computes_it():
    np.testing.assert_allclose(prime(formula="prime_code")(golden(), GOLDEN_Q)[0], CODE, atol=2e-6)
    np.testing.assert_allclose(prime(formula="prime_code", whiten=True)(golden(), GOLDEN_Q)[0], WHITENED, atol=2e-6)
    raw = np.array(CODE)[GOLDEN_MASK]
    assert raw.mean() == pytest.approx(-0.51481351, abs=1e-6) and raw.var(ddof=1) == pytest.approx(1.0018292, abs=1e-5)


def test_discount_per_source():
    _, returns, _ = prime(formula="prime_code", process_gamma=0.9, outcome_gamma=0.5)(golden(), GOLDEN_Q)
    np.testing.assert_allclose(returns["process"], CODE_GAMMA, atol=2e-6)
    to_end = np.maximum(np.array([[3], [2], [4], [1]]) - 1 - np.arange(4), 0)
    np.testing.assert_allclose(returns["outcome"], GOLDEN_MASK * RLOO[:, None] * 0.5**to_end, atol=2e-6)


def test_weights_and_accumulation():
    weighted = build_advantage(estimator="rloo", outcome_weight=2.0, process_weight=jnp.float32(0.5))(golden(), GOLDEN_Q)
    np.testing.assert_allclose(weighted[0], 2 * weighted[1]["outcome"] + 0.5 * weighted[1]["process"], atol=1e-6)
    each = np.asarray(prime(accumulate=False)(golden(), GOLDEN_Q)[1]["process"])
    np.testing.assert_allclose(np.cumsum(each[:, ::-1], 1)[:, ::-1] * GOLDEN_MASK, weighted[1]["process"], atol=1e-6)


def test_steps_give_every_token_the_return_of_its_step():
    """Rewards of steps [.1, .3], [.6], [-.2, -.4], [.6] by hand, paper's bracket, no scale."""
    step = np.array([[0, 0, 1, 9], [0, 0, 9, 9], [0, 0, 1, 1], [0, 9, 9, 9]])
    rollouts = make_rollouts(GOLDEN_MASK, [1, 0, 1, 0], 4, step=step)
    means = np.array([0.2, 0.6, -0.3, 0.6])
    baseline = (means.sum() - means) / 3
    rewards = [[0.1, 0.3], [0.6], [-0.2, -0.4], [0.6]]
    returns = [np.cumsum((np.array(r) - b)[::-1])[::-1] for r, b in zip(rewards, baseline)]
    want = np.array([[returns[i][s] if s < 9 else 0 for s in row] for i, row in enumerate(step)])
    got = prime(granularity="step", max_steps=3, process_scale="none")(rollouts, GOLDEN_Q)[1]["process"]
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_process_part_scaled_to_the_outcome_part():
    _, returns, metrics = prime(process_scale="rms")(golden(), GOLDEN_Q)
    assert float(metrics["critic/process_return_rms"]) == pytest.approx(float(metrics["critic/outcome_return_rms"]), rel=1e-5)
    unscaled = prime(process_scale="none")(golden(), GOLDEN_Q)[1]["process"]
    ratio = np.asarray(returns["process"])[GOLDEN_MASK] / np.asarray(unscaled)[GOLDEN_MASK]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)


def test_groups_without_contrast_get_no_process_credit():
    mask = np.ones((4, 3), bool)
    rollouts = make_rollouts(mask, [1, 1, 1, 0], 2)
    q = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    process = prime(contrast_only=True, process_scale="none")(rollouts, q)[1]["process"]
    assert not process[:2].any() and process[2:].all()
    np.testing.assert_allclose(process[2:], prime(process_scale="none")(rollouts, q)[1]["process"][2:], atol=1e-6)
    # nor do their rewards set the scale of the others
    loud = q * np.array([[1e3], [1e3], [1], [1]])
    np.testing.assert_allclose(*(prime(contrast_only=True)(rollouts, x)[1]["process"] for x in (q, loud)), atol=1e-6)


def test_kl_in_the_reward_enters_before_the_baseline():
    kl = np.where(GOLDEN_MASK, -0.1, np.nan).astype(np.float32)
    got = build_advantage(estimator="rloo")(golden(), kl_rewards=kl)[0][:, 0]
    shifted = np.array([1, 0, 1, 0]) - 0.1 * GOLDEN_MASK.sum(1)
    np.testing.assert_allclose(got, 4 / 3 * (shifted - shifted.mean()), atol=2e-6)


def test_metrics_count():
    rollouts = make_rollouts(np.ones((4, 2), bool), [1, np.nan, 1, 0], 2, known=[1, 1, 1, 1], valid=[1, 1, 1, 1])
    advantages, _, metrics = prime()(rollouts, jnp.array([[0.1, -0.5]] * 4))
    want = {
        "critic/score/mean": 2 / 3,
        "critic/labelled": 3,
        "critic/unlabelled": 1,
        "critic/contrast_groups": 0.5,
        "prm/max_return": 0.5,
    }
    for name, value in want.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5), name
    assert float(metrics["critic/advantages/max"]) == pytest.approx(float(advantages.max()))
    assert float(metrics["critic/advantages/min"]) == pytest.approx(float(advantages.min()))


# ------------------------------------------------------------------------------------------------ properties of all

ALL = {
    "grpo": dict(estimator="grpo"),
    "dr_grpo": dict(estimator="dr_grpo"),
    "rloo, discounted": dict(estimator="rloo", outcome_gamma=0.9),
    "prime, paper": dict(estimator="rloo", process_weight=1.0),
    "prime, code": dict(estimator="rloo", process_weight=0.3, formula="prime_code", whiten=True, scale_floor=0.1),
    "prime, steps": dict(estimator="grpo", process_weight=1.0, granularity="step", max_steps=4, process_gamma=0.9),
    "prime, per step": dict(
        estimator="grpo",
        process_weight=1.0,
        granularity="step",
        max_steps=4,
        accumulate=False,
        process_scale="rms",
        contrast_only=True,
    ),
}
COMPILED = {name: jax.jit(build_advantage(**options)) for name, options in ALL.items()}
OUTCOME_ONLY = {name: jax.jit(build_advantage(estimator=name)) for name in ("grpo", "dr_grpo", "rloo")}
FORMULAS_COMPILED = {
    (f, a, g): jax.jit(prime(formula=f, accumulate=a, granularity=g, max_steps=4))
    for f in ("paper", "prime_code")
    for a in (True, False)
    for g in ("token", "step")
}
every = pytest.mark.parametrize("name", ALL)
P, G, T = 3, 4, 6


@every
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_padding_and_garbage_change_nothing(name, seed):
    rollouts, q, _, _ = random_rollouts(seed, P, G, T)
    mask, known = np.asarray(rollouts.token_mask), np.asarray(rollouts.labelled)
    want = COMPILED[name](rollouts, jnp.asarray(q))
    garbage = pad_rollouts(rollouts, 3).replace(outcome=spoil(rollouts.outcome, known))
    got = COMPILED[name](garbage, pad(spoil(q, mask), 3, np.nan))
    np.testing.assert_allclose(got[0][:, :T], want[0], atol=1e-5)
    assert not np.any(got[0][:, T:]) and not np.any(np.asarray(got[0])[:, :T][~mask])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got[2], want[2])


@every
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_order_of_prompts_and_of_samples(name, seed):
    rollouts, q, _, _ = random_rollouts(seed, P, G, T)
    rng = np.random.default_rng(seed)
    order = np.concatenate([p * G + rng.permutation(G) for p in rng.permutation(P)])
    permuted = jax.tree.map(lambda x: x[order], rollouts)
    np.testing.assert_allclose(COMPILED[name](permuted, q[order])[0], COMPILED[name](rollouts, q)[0][order], atol=1e-5)


DEGENERATE = {
    "groups of one": lambda: random_rollouts(0, 5, 1, T),
    "one row": lambda: random_rollouts(0, 1, 1, T),
    "a window of nothing": lambda: random_rollouts(0, P, G, 0),
    "all right": lambda: _with(outcome=jnp.ones(P * G)),
    "all wrong": lambda: _with(outcome=jnp.zeros(P * G)),
    "nothing sampled": lambda: _with(action=jnp.zeros((P * G, T), bool)),
    "nothing valid": lambda: _with(valid=jnp.zeros(P * G, bool)),
    "nothing known": lambda: _with(known=jnp.zeros(P * G, bool)),
    "all NaN": lambda: _with(outcome=jnp.full(P * G, jnp.nan)),
}


def _with(**changes):
    rollouts, *rest = random_rollouts(0, P, G, T)
    return rollouts.replace(**changes), *rest


OTHER_SHAPES = ("groups of one", "one row", "a window of nothing")  # each compiles anew: only for the most different compositions


@pytest.mark.parametrize(
    "name, case", [(n, c) for c in DEGENERATE for n in (("prime, code", "prime, per step") if c in OTHER_SHAPES else ALL)]
)
def test_degenerate_batches_are_finite(name, case):
    rollouts, q, _, _ = DEGENERATE[case]()
    for rewards in (q, 0 * q):
        got = COMPILED[name](rollouts, rewards)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    if case in ("groups of one", "all right", "all wrong", "nothing valid", "nothing known"):
        np.testing.assert_allclose(got[1]["outcome"], 0, atol=1e-6)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), estimator=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_outcome_advantages_sum_to_zero_in_a_group(seed, estimator):
    rollouts, q, _, _ = random_rollouts(seed, P, G, T)
    rollouts = rollouts.replace(action=jnp.ones((P * G, T), bool))
    first = OUTCOME_ONLY[estimator](rollouts)[0][:, 0]
    np.testing.assert_allclose(first.reshape(P, G).sum(1), 0, atol=1e-5)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), granularity=st.sampled_from(["token", "step"]))
def test_code_and_paper_differ_by_a_zero_sum(seed, granularity):
    """Accumulated they agree at the first token; un-accumulated, the differences over the units of a response sum to 0."""
    rollouts, q, _, _ = random_rollouts(seed, P, G, T)

    def process(formula, accumulate):
        return FORMULAS_COMPILED[formula, accumulate, granularity](rollouts, q)[1]["process"]

    np.testing.assert_allclose(process("paper", True)[:, 0], process("prime_code", True)[:, 0], atol=1e-5)
    extra = process("prime_code", False) - process("paper", False)
    ends = rollouts.token_mask if granularity == "token" else last_tokens(rollouts.step, rollouts.token_mask)
    np.testing.assert_allclose(jnp.sum(jnp.where(ends, extra, 0), 1), 0, atol=1e-5)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 100))
def test_scaling(seed, scale):
    """A scale of the rewards leaves the process part; a scale of both sources leaves whitened advantages."""
    rollouts, q, _, _ = random_rollouts(seed, P, G, T)
    process = FORMULAS_COMPILED["paper", True, "token"]
    np.testing.assert_allclose(process(rollouts, q * scale)[0], process(rollouts, q)[0], rtol=1e-3, atol=1e-3)
    plain = weighted(rollouts, q, jnp.float32(1.0))
    if float(plain[2]["critic/advantages/rms"]) > 0.5:  # else there is nothing but the epsilon
        np.testing.assert_allclose(weighted(rollouts, q, jnp.float32(scale))[0], plain[0], atol=2e-3)


@jax.jit
def weighted(rollouts, q, weight):
    return build_advantage(estimator="rloo", process_weight=weight, outcome_weight=weight, whiten=True)(rollouts, q)


def test_silent_prm_leaves_outcome_rloo():
    np.testing.assert_allclose(prime()(golden(), 0 * GOLDEN_Q)[0], build_advantage(estimator="rloo")(golden())[0], atol=1e-7)


# ------------------------------------------------------------------------------------------------ gradients


def test_policy_loss_does_not_move_the_prm_nor_the_reference():
    """d(policy loss)/d(PRM) = 0, also when the reference is the policy itself; the gradient to the policy is the plain one."""
    rollouts, q, logp, mask = random_rollouts(0, P, G, T)
    f = build_advantage(estimator="rloo", process_weight=1.0, whiten=True)

    def loss(policy, prm, ref):
        rewards = token_rewards(log_ratio(prm, ref, mask), mask, 0.05)
        advantages, _, _ = f(rollouts, rewards)
        return policy_loss(policy, jax.lax.stop_gradient(policy), advantages, rollouts.token_mask)[0]

    policy, prm, ref = jnp.asarray(logp), jnp.asarray(logp + q), jnp.asarray(logp - 0.1)
    to_policy, to_prm, to_ref = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(policy, prm, ref)
    assert np.any(to_policy) and not np.any(to_prm) and not np.any(to_ref)
    shared = jax.jit(jax.grad(lambda x: loss(x, prm, x)))(policy)
    apart = jax.jit(jax.grad(loss))(policy, prm, policy)
    np.testing.assert_array_equal(shared, apart)


def test_advantages_carry_no_gradient():
    rollouts, q, _, _ = random_rollouts(0, P, G, T)
    f = FORMULAS_COMPILED["paper", True, "token"]
    gradient = jax.grad(lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(f(rollouts, x))))(jnp.asarray(q))
    assert not np.any(gradient)


BAD = {
    "estimator": (dict(estimator="ppo"), "'ppo'", "config.rl.estimator"),
    "formula": (dict(formula="verl"), "'verl'", "config.rl.formula"),
    "granularity": (dict(granularity="turns"), "'turns'", "config.rl.granularity"),
    "scale": (dict(process_scale="std"), "'std'", "config.rl.process_scale"),
    "steps": (dict(granularity="step"), "max_steps=None", "config.rl.max_steps"),
}


@pytest.mark.parametrize("options, found, where", BAD.values(), ids=BAD)
def test_unknown_options(options, found, where):
    with pytest.raises(UserError) as error:
        build_advantage(**options)
    assert found in error.value.found and error.value.where == where and error.value.expected and error.value.fix


def test_process_weight_without_rewards():
    with pytest.raises(UserError) as error:
        prime()(golden())
    assert error.value.found == "no token rewards" and error.value.where == "config.rl.process_weight" and error.value.fix
