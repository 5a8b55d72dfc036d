"""The compiled PRIME step where numbers are missing, infinite or all alike, and which prompts it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.rl.learner import Learner
from tests.rl.step_rig import (
    ADVANTAGE,
    OUTCOMES,
    TX,
    G,
    N,
    P,
    counts,
    learner,
    moved,
    mu,
    params,
    program,
    rollouts,
    same,
    spoilt,
    step,
)

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
    bad = {
        "nan": r.replace(outcome=jnp.where(row, jnp.nan, r.outcome)),
        "unknown": r.replace(known=~row),
        "filler": r.replace(valid=~row),
    }[how]
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
    one = r.replace(
        lengths=jnp.where(row, r.prompt_lengths, r.lengths),
        action=r.action & ~row[:, None],
        step=jnp.where(row[:, None], -1, r.step),
    )
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
