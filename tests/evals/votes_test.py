"""pass@k, majority and best-of-n against counting by hand."""

import itertools

import numpy as np
import pytest

from jprm.evals.votes import best_of_n, majority, majority_accuracy, pass_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(k):
    correct = np.random.default_rng(k).random((7, 6)) < np.linspace(0, 1, 7)[:, None]  # none right, some, all
    subsets = list(itertools.combinations(range(6), k))
    by_hand = np.mean([[row[list(s)].any() for s in subsets] for row in correct])
    assert pass_at_k(correct, k) == pytest.approx(by_hand, abs=1e-12)
    assert 0 < by_hand < 1


def test_pass_at_k_takes_outcomes_as_floats_and_needs_k_samples():
    assert pass_at_k(np.array([[1.0, 0.0], [0.0, 0.0]]), 1) == 0.25
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"k = {k} of 2"):
            pass_at_k(np.zeros((4, 2)), k)


def test_pass_at_k_of_many_samples_does_not_overflow():
    correct = np.arange(4096)[None] < 2
    assert pass_at_k(correct, 2048) == pytest.approx(1 - (2048 * 2047) / (4096 * 4095), rel=1e-9)


@pytest.mark.parametrize(
    "answers, index",
    [
        ([5, 7, 7], 1),
        ([7, 5, 5, 7], 0),  # a tie goes to the earlier answer
        ([None, None, 3], 2),  # what gives no answer has no vote
        ([None, 4, 9, 9, None], 2),
        ([None, None], None),
        ([], None),
        ([0, 0, 1], 0),  # zero is an answer
    ],
)
def test_majority(answers, index):
    assert majority(answers) == index


def test_majority_accuracy_looks_at_the_chosen_sample():
    answers = [[1, 2, 2], [3, 4, 4], [None, None, None], [5, 6, 7]]
    correct = np.array([[0, 1, 1], [1, 0, 0], [1, 1, 1], [1, 0, 0]])
    assert majority_accuracy(answers, correct) == 0.5  # right, wrong, no answer, a tie whose first is right


def test_best_of_n_takes_the_highest_score_and_the_earlier_of_equals():
    scores = np.array([[0.1, 0.9, 0.5], [2.0, 2.0, 1.0], [-3.0, -1.0, -2.0], [0.0, 0.0, 0.0]])
    correct = np.array([[1, 0, 1], [1, 0, 1], [0, 1, 0], [1, 0, 0]], float)
    assert best_of_n(scores, correct) == 0.75
    assert best_of_n(correct, correct) == 1.0
