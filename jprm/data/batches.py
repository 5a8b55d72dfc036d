"""Which rows iteration i reads: a pure function of (seed, i), so that one integer is the whole state of the data."""

import grain


class Stream:
    """Row numbers in shuffled passes over ``size`` rows, indexed rather than iterated.

    Every pass is another permutation, made by Grain's index shuffle: nothing of length ``size`` is ever built, and there is no
    iterator whose position could be lost.

    Args:
      size: rows.
      seed: of the permutations.

    Example:
      >>> sorted(Stream(4, seed=0).batch(0, 4))
      [0, 1, 2, 3]
    """

    def __init__(self, size: int, *, seed: int):
        self._rows = grain.MapDataset.range(size).shuffle(seed=seed).repeat()

    def batch(self, iteration: int, rows: int) -> list[int]:
        """The rows of one iteration; together the iterations walk through pass after pass without a gap."""
        return [int(self._rows[i]) for i in range(iteration * rows, (iteration + 1) * rows)]
