"""Where the seconds of an iteration go: `timing_s/{gen,verify,step,…}`, under the names that verl's users know."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timers:
    """Seconds per phase of one iteration, summed when a phase is entered more than once.

    JAX returns before the device is done: wait for a phase's result inside its block, or its time is charged to the next phase.

    Example:
      >>> timers = Timers()
      >>> with timers("gen"):
      ...     pass
      >>> sorted(timers.collect())
      ['timing_s/gen', 'timing_s/iteration']
    """

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """The metrics of the iteration that ends here, with `timing_s/iteration` (since the last call); starts the next one."""
        now = time.perf_counter()
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["timing_s/iteration"] = now - self._start
        self._seconds, self._start = {}, now
        return metrics
