"""First-error predictions, F1, the tuned threshold and the chance level against ten lines of plain Python."""

import itertools
import math

import numpy as np
import pytest

from jprm.evals.first_error import chance_f1, f1, predict, tune_threshold


def reference_prediction(scores, exists, threshold):
    for step, (score, there) in enumerate(zip(scores, exists)):
        if there and score < threshold:
            return step
    return -1


def reference_f1(predicted, truth):
    wrong = [p == t for p, t in zip(predicted, truth) if t >= 0]
    right = [p == -1 for p, t in zip(predicted, truth) if t == -1]
    a, b = sum(wrong) / len(wrong), sum(right) / len(right)
    return 0.0 if a + b == 0 else 2 * a * b / (a + b)


@pytest.fixture(scope="module")
def rows():
    """Scores that tell right steps from wrong ones, but not always: (scores f32[R, S], exists bool[R, S], truth i64[R])."""
    rng = np.random.default_rng(0)
    R, S = 60, 5
    exists = np.arange(S) < rng.integers(1, S + 1, R)[:, None]
    truth = np.where(rng.random(R) < 0.5, -1, rng.integers(0, exists.sum(axis=1)))
    scores = rng.normal(0.5, 0.5, (R, S)) - 1.0 * (np.arange(S) == truth[:, None])
    return np.where(exists, scores, -100.0).astype(np.float32), exists, truth  # what does not exist must not count


@pytest.mark.parametrize("threshold", [-200.0, -0.5, 0.0, 0.3, 200.0])
def test_predictions_and_f1_agree_with_the_reference(rows, threshold):
    scores, exists, truth = rows
    expected = [reference_prediction(*row, threshold) for row in zip(scores, exists)]
    predicted = predict(scores, exists, threshold)
    assert predicted.tolist() == expected
    assert f1(predicted, truth) == pytest.approx(reference_f1(expected, truth))


def test_a_score_at_the_threshold_is_no_error():
    assert predict(np.array([[0.5, 0.25]]), np.ones((1, 2), bool), 0.25).tolist() == [-1]


def test_f1_by_hand():
    truth = np.array([2, 0, 1, 3, -1, -1])
    assert f1(np.array([2, 0, -1, 1, -1, 0]), truth) == 0.5  # two of four, one of two
    assert f1(np.array([2, 0, 1, 3, 0, 0]), truth) == 0.0  # no right solution is let through
    assert f1(np.full(6, 4), truth) == 0.0
    assert f1(truth, truth) == 1.0


@pytest.mark.parametrize("truth", [[-1, -1, -1], [0, 2, 1]])
def test_without_one_of_the_kinds_there_is_no_f1(truth):
    assert math.isnan(f1(np.array([-1, 0, 1]), np.array(truth)))
    assert math.isnan(chance_f1(np.array([-1, 0, 1]), np.array(truth), np.arange(3), permutations=5))


@pytest.mark.parametrize("grid", [5, 200])
def test_the_tuned_threshold_is_the_best_of_the_grid(rows, grid):
    scores, exists, truth = rows
    candidates = np.quantile(scores[exists], np.linspace(0, 1, grid))
    values = [reference_f1([reference_prediction(*row, t) for row in zip(scores, exists)], truth) for t in candidates]
    threshold = tune_threshold(scores, exists, truth, grid)
    assert min(abs(candidates - threshold)) == 0 and min(values) < max(values)
    assert f1(predict(scores, exists, threshold), truth) == pytest.approx(max(values), abs=1e-12)


def test_scores_that_separate_give_an_f1_of_one(rows):
    _, exists, truth = rows
    scores = np.where(np.arange(exists.shape[1]) == truth[:, None], -1.0, 1.0)
    assert f1(predict(scores, exists, tune_threshold(scores, exists, truth)), truth) == 1.0


# Three solutions a problem: the error tends to be at the place in the group, which is what rank keeps.
PREDICTED = np.array([0, -1, 2, 1, -1, -1, 0, -1, 2, -1, 0, 1])
TRUTH = np.array([0, -1, 2, -1, -1, 1, 0, -1, 2, 1, -1, -1])


def test_chance_is_the_mean_over_all_ways_to_deal_problems_out():
    problem = np.repeat([7, 3, 9, 5], 3)
    groups = PREDICTED.reshape(4, 3)
    expected = np.mean([reference_f1(groups[list(p)].ravel(), TRUTH) for p in itertools.permutations(range(4))])
    on_their_own = chance_f1(PREDICTED, TRUTH, np.arange(12), 4000)
    assert chance_f1(PREDICTED, TRUTH, problem, 4000) == pytest.approx(expected, abs=0.015)
    assert abs(on_their_own - expected) > 0.05  # the table tells the two apart
    order = np.random.default_rng(1).permutation(12)  # problems' rows need not be neighbours
    interleaved = np.argsort(np.tile(np.arange(3), 4), kind="stable")
    assert chance_f1(PREDICTED[interleaved], TRUTH[interleaved], problem[interleaved], 4000) == pytest.approx(expected, abs=0.015)
    assert 0 <= chance_f1(PREDICTED[order], TRUTH[order], problem[order], 10) <= 1


def test_unequal_groups_move_row_by_row():
    predicted, truth = PREDICTED[:6], TRUTH[:6]
    expected = np.mean([reference_f1(p, truth) for p in itertools.permutations(predicted)])
    assert chance_f1(predicted, truth, np.array([0, 0, 0, 0, 1, 1]), 4000) == pytest.approx(expected, abs=0.015)


def test_chance_repeats_exactly_and_follows_its_seed():
    problem = np.repeat(np.arange(4), 3)
    values = [chance_f1(PREDICTED, TRUTH, problem, 50, seed) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
