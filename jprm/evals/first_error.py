"""ProcessBench's task: say which step of a solution is the first wrong one, or that none is (Zheng et al., arXiv 2412.06559)."""

import numpy as np


def predict(scores_RxS: np.ndarray, exists_RxS: np.ndarray, threshold: float) -> np.ndarray:
    """i64[R]: the first step whose score is below the threshold, -1 where there is none."""
    below = (scores_RxS < threshold) & exists_RxS
    return np.where(below.any(axis=1), below.argmax(axis=1), -1)


def f1(predicted_R: np.ndarray, truth_R: np.ndarray) -> float:
    """Harmonic mean of the accuracy on wrong solutions (the very step) and on right ones (-1); nan where one kind is missing."""
    predicted_R, truth_R = np.asarray(predicted_R), np.asarray(truth_R)
    wrong = truth_R >= 0
    if wrong.all() or not wrong.any():
        return float("nan")
    hit = predicted_R == truth_R
    a, b = float(hit[wrong].mean()), float(hit[~wrong].mean())
    return 2 * a * b / (a + b) if a + b else 0.0


def tune_threshold(scores_RxS: np.ndarray, exists_RxS: np.ndarray, truth_R: np.ndarray, grid: int = 200) -> float:
    """The threshold of best F1 among quantiles of the scores. Tune on other rows than those that are reported."""
    candidates = np.unique(np.quantile(scores_RxS[exists_RxS], np.linspace(0, 1, grid)))
    values = [f1(predict(scores_RxS, exists_RxS, t), truth_R) for t in candidates]
    return float(candidates[int(np.nanargmax(values))])


def chance_f1(
    predicted_R: np.ndarray, truth_R: np.ndarray, problem_R: np.ndarray, permutations: int = 1000, seed: int = 0
) -> float:
    """Mean F1 when predictions are dealt out to other problems: what knowing only *how often* and *where* errors fall earns.

    Predictions of one problem move together (rows of equal rank within their problem), so that the permutation breaks the tie
    between a solution and its prediction and nothing else.
    """
    predicted_R, truth_R = np.asarray(predicted_R), np.asarray(truth_R)
    rng = np.random.default_rng(seed)
    problems, index = np.unique(problem_R, return_inverse=True)
    rank = np.zeros(len(index), int)  # of a row within its problem
    seen = np.zeros(len(problems), int)
    for r, p in enumerate(index):
        rank[r], seen[p] = seen[p], seen[p] + 1
    if (seen != seen[0]).any():  # unequal groups: rows move on their own
        return float(np.mean([f1(rng.permutation(predicted_R), truth_R) for _ in range(permutations)]))
    table = np.empty((len(problems), seen[0]), predicted_R.dtype)
    table[index, rank] = predicted_R
    return float(np.mean([f1(table[rng.permutation(len(problems))][index, rank], truth_R) for _ in range(permutations)]))
