"""Baselines and scales one by one."""

import jax.numpy as jnp
import numpy as np
import pytest

from jprm.errors import UserError
from jprm.rl.credit import suffix_sums
from jprm.rl.normalise import max_return, norm, rms, scale_to, whiten
from jprm.rl.signal import outcome, signal
from tests.rl.batches import GOLDEN_MASK, GOLDEN_Q, golden, make_rollouts, random_rollouts, spoil


def rows(rewards, group=None, **options):
    return make_rollouts(np.ones((len(rewards), 2), bool), rewards, group or len(rewards), **options)


def of_outcome(op, rollouts):
    return np.asarray(op(outcome(rollouts), rollouts).value)


GRPO, TRL, DDOF0 = norm(), norm(eps=1e-4), norm(ddof=0, eps=0.0)
DR, RLOO = norm(scale="none"), norm(center="loo", scale="none")
C1, C2, C3 = [1, 0, 0, 1, 0, 0, 0, 0], [1, 0.5, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]
GOLDEN = {
    "C1 grpo": (GRPO, C1, np.where(C1, 1.620182, -0.540061)),
    "C1 grpo eps 1e-4": (TRL, C1, np.where(C1, 1.619835, -0.539945)),
    "C1 grpo ddof 0": (DDOF0, C1, np.where(C1, 1.732051, -0.57735)),
    "C1 dr": (DR, C1, np.where(C1, 0.75, -0.25)),
    "C1 rloo": (RLOO, C1, np.where(C1, 0.857143, -0.285714)),
    "C2 grpo": (GRPO, C2, [1.30558, 0.261116, -0.783348, -0.783348]),
    "C2 dr": (DR, C2, [0.625, 0.125, -0.375, -0.375]),
    "C2 rloo": (RLOO, C2, [0.833333, 0.166667, -0.5, -0.5]),
    "C3 grpo": (GRPO, C3, np.where(C3, 1.2076124, -0.7245674)),
    "C3 rloo": (RLOO, C3, np.where(C3, 5 / 7, -3 / 7)),
}


@pytest.mark.parametrize("op, rewards, want", GOLDEN.values(), ids=GOLDEN)
def test_outcome_golden(op, rewards, want):
    np.testing.assert_allclose(of_outcome(op, rows(rewards)), want, atol=2e-6)


ESTIMATORS = {"grpo": GRPO, "ddof0": DDOF0, "dr": DR, "rloo": RLOO, "loo_rows": norm(center="loo_rows", scale="none")}


@pytest.mark.parametrize("op", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.35] * 7, [100.35] * 7, [1.0] * 4, [0.0] * 4, [0.3]])
def test_groups_without_contrast_give_zero(op, rewards):
    got = of_outcome(op, rows(rewards))
    np.testing.assert_allclose(got, 0, atol=1e-6 * rewards[0])  # what a centred mean leaves in fp32, not amplified
    if len(rewards) == 1:
        assert (got == 0).all()  # groups of one: exactly


def test_singleton_among_equals_is_bounded():
    """Seven .35 and one .95: fp32 residue in a spread must not become a huge advantage."""
    got = of_outcome(GRPO, rows([0.35] * 7 + [0.95]))
    np.testing.assert_allclose(got, [-0.353553] * 7 + [2.474874], rtol=1e-4)


def test_unlabelled_and_filler_rows_enter_no_statistic():
    rollouts = rows([1, 0, 9, np.nan, 9], known=[1, 1, 0, 1, 1], valid=[1, 1, 1, 1, 0])
    np.testing.assert_allclose(of_outcome(RLOO, rollouts), [1, -1, 0, 0, 0])


def test_groups_do_not_mix():
    np.testing.assert_allclose(of_outcome(RLOO, rows([1, 0, 0, 0.5], group=2)), [1, -1, -0.5, 0.5])  # repeat, not tile


def test_where_and_min_n():
    """PAPO's process channel: normalised among correct rows only, silent where there are fewer than two."""
    rollouts = rows([1, 1, 1, 1])
    rubric = signal(jnp.array([1, 1, 0.5, 0]), jnp.ones(4, bool), "row")
    right = lambda r: r.outcome > 0.5  # noqa: E731
    got = norm(where=right, min_n=2)(rubric, rollouts).value
    np.testing.assert_allclose(got, [0.783348, 0.783348, -0.261116, -1.30558], atol=2e-5)
    assert not np.any(norm(where=right, min_n=2)(rubric, rollouts.replace(outcome=jnp.array([1.0, 0, 0, 0]))).value)


STEP_SCORES = jnp.array([[0.9, 0.8, 0.95], [0.7, 0.9, 0], [0.9, 0.4, 0.2], [0.3, 0.85, 0.6]])
STEP_MASK = jnp.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]], bool)


def test_process_grpo():
    """C4: all step rewards of the group are pooled."""
    steps = signal(jnp.array([[0.9, 0.2, 0], [0.5, 0, 0], [-0.1, 0.4, 0.1]]), jnp.arange(3) < jnp.array([[2], [1], [3]]), "step")
    rollouts = rows([1, 0, 1])
    got = norm()(steps, rollouts)
    np.testing.assert_allclose(
        suffix_sums(got.value, got.mask),
        [[1.237254, -0.380693, 0], [0.475867, 0, 0], [-1.713121, -0.475867, -0.666214]],
        atol=1e-5,
    )


KEYS = {
    "row": lambda x, m, i, k: x[i][m[i]],
    "unit": lambda x, m, i, k: x[:, k][m[:, k]],
    "group": lambda x, m, i, k: x[m],
    "batch": lambda x, m, i, k: x[m],
}


@pytest.mark.parametrize("key", KEYS)
def test_keys_pool_what_they_say(key):
    rollouts, x, m = rows([1, 0, 1, 0]), np.asarray(STEP_SCORES), np.asarray(STEP_MASK)
    got = norm(key)(signal(STEP_SCORES, STEP_MASK, "step"), rollouts).value
    for i in range(4):
        for k in range(3):
            pool = KEYS[key](x, m, i, k)
            want = (x[i, k] - pool.mean()) / (pool.std(ddof=1) + 1e-6) if m[i, k] else 0
            assert float(got[i, k]) == pytest.approx(want, abs=1e-5)


def test_constant_center():
    np.testing.assert_allclose(of_outcome(norm(center=0.5, scale="none"), rows([1, 0])), [0.5, -0.5])


def test_leave_one_row_out_golden():
    q = scale_to()(signal(GOLDEN_Q, GOLDEN_MASK, "token"), golden())
    np.testing.assert_allclose(
        q.value,
        [
            [0.333333, -0.166666, 0.499999, 0],
            [0.833332, 0.166667, 0, 0],
            [-0.666666, 0.333333, -0.499999, -0.166667],
            [0.999998, 0, 0, 0],
        ],
        atol=2e-6,
    )
    baselines = (q.value - norm(center="loo_rows", scale="none")(q, golden()).value)[:, 0]
    np.testing.assert_allclose(baselines, [0.416666, 0.324074, 0.574073, 0.157407], atol=2e-6)


def test_empty_rows_are_not_peers():
    """A response of no tokens has no mean; it must not count as a row of mean 0."""
    mask = np.array([[1, 1], [1, 0], [0, 0]], bool)
    s = signal(jnp.array([[1.0, 3], [5, 0], [0, 0]]), mask, "token")
    got = norm(center="loo_rows", scale="none")(s, make_rollouts(mask, [1, 0, 1], 3)).value
    np.testing.assert_allclose(got, [[-4, -2], [3, 0], [0, 0]])


ZERO_SIGNAL = 1e-5 * np.array([[1, -2, 1], [0.5, 0.5, -1]], np.float32)


def test_zero_signal_is_amplified_without_a_floor_and_not_with_one():
    s, rollouts = signal(ZERO_SIGNAL, np.ones((2, 3), bool), "token"), rows([1, 0])
    loud = scale_to("max_return")(s, rollouts).value
    np.testing.assert_allclose(loud, [[0.909091, -1.818182, 0.909091], [0.454545, 0.454545, -0.909091]], rtol=1e-4)
    for kind in ("max_return", "rms"):
        quiet = scale_to(kind, floor=0.1)(s, rollouts).value
        np.testing.assert_allclose(quiet, ZERO_SIGNAL / 0.1, rtol=1e-4)
        loud = scale_to(kind, floor=1e-3)(signal(GOLDEN_Q, GOLDEN_MASK, "token"), golden()).value
        np.testing.assert_allclose(loud, scale_to(kind)(signal(GOLDEN_Q, GOLDEN_MASK, "token"), golden()).value)  # floor not met


def test_scale_is_over_the_batch():
    s = signal(GOLDEN_Q, GOLDEN_MASK, "token")
    assert float(max_return(s)) == pytest.approx(0.6, abs=1e-6)
    n = GOLDEN_MASK.sum()
    assert float(rms(s)) == pytest.approx(np.sqrt((GOLDEN_Q**2).sum() / n), rel=1e-6)
    assert float(rms(scale_to("rms", target=2.0)(s, golden()))) == pytest.approx(2.0, rel=1e-5)
    target = lambda r: signal(jnp.full((4, 4), 3.0), r.token_mask, "token")  # noqa: E731
    assert float(rms(scale_to("rms", target=target)(s, golden()))) == pytest.approx(3.0, rel=1e-5)


def test_whiten():
    rollouts, q, _, _ = random_rollouts(3, 3, 4, 6)
    mask = np.asarray(rollouts.token_mask)
    got = np.asarray(whiten()(signal(spoil(q + 5, mask), mask, "token"), rollouts).value)
    assert got[mask].mean() == pytest.approx(0, abs=1e-5) and got[mask].var(ddof=1) == pytest.approx(1, rel=1e-4)
    assert not got[~mask].any()
    for empty in (np.zeros_like(mask), mask):  # nothing there; everything equal
        assert np.isfinite(whiten()(signal(np.full_like(q, 0.35), empty, "token"), rollouts).value).all()


BAD = [
    (lambda: norm(center="median"), "'median'"),
    (lambda: norm(scale="mad"), "'mad'"),
    (lambda: norm("prompt")(outcome(golden()), golden()), "'prompt'"),
    (lambda: scale_to("max"), "'max'"),
    (lambda: signal(jnp.zeros(3), jnp.ones(3, bool), "seq"), "'seq'"),
]


@pytest.mark.parametrize("call, found", BAD, ids=[f for _, f in BAD])
def test_unknown_names(call, found):
    with pytest.raises(UserError) as error:
        call()
    assert found in error.value.found and error.value.expected and error.value.where and error.value.fix
