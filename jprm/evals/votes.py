"""What n samples of one problem say together: pass@k, majority, best of n."""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def pass_at_k(correct_PxG: np.ndarray, k: int) -> float:
    """Share of problems that k samples would solve: the unbiased estimate from G >= k (Chen et al., arXiv 2107.03374, eq. 1)."""
    correct_PxG = np.asarray(correct_PxG, bool)
    G = correct_PxG.shape[1]
    if not 1 <= k <= G:
        raise ValueError(f"k = {k} of {G} samples")
    wrong_P = G - correct_PxG.sum(axis=1)
    miss_P = np.ones(len(correct_PxG))
    for i in range(k):  # C(wrong, k) / C(G, k), as a product that stays in [0, 1]
        miss_P *= np.maximum(wrong_P - i, 0) / (G - i)
    return float(np.mean(1.0 - miss_P))


def majority(answers: Sequence[Hashable | None]) -> int | None:
    """Index of the first sample with the most frequent answer, of several the earliest; None where no sample gives an answer."""
    counts = Counter(a for a in answers if a is not None)
    if not counts:
        return None
    best = counts.most_common(1)[0][0]
    return next(i for i, a in enumerate(answers) if a == best)


def majority_accuracy(answers_PxG: Sequence[Sequence[Hashable | None]], correct_PxG: np.ndarray) -> float:
    """Share of problems whose most frequent answer is right."""
    chosen = [majority(answers) for answers in answers_PxG]
    return float(np.mean([i is not None and bool(row[i]) for i, row in zip(chosen, correct_PxG)]))


def best_of_n(scores_PxG: np.ndarray, correct_PxG: np.ndarray) -> float:
    """Share of problems whose highest-scored sample is right; ties go to the earlier sample."""
    best = np.argmax(scores_PxG, axis=1)
    return float(np.mean(np.asarray(correct_PxG, bool)[np.arange(len(best)), best]))
