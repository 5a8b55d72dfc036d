"""What a person sees while a run goes: a bar on a terminal, plain lines under nohup or in a scheduler's log.

rl 12/80  acc .41  prm auc .63  1.31 s/it  ETA 1m29s  gen .6 verify .0 step .7
"""

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

import jax
from tqdm import tqdm


class Progress:
    """Shows one phase at a time; silent on every process but the first.

    The rate is an average that forgets (weight .2 for the newest iteration). It leaves out the first iteration of each phase,
    which compiles, and so does the ETA, which is of the current phase: other phases run at other speeds.

    Args:
      interval_s: without a terminal, seconds between lines, 0 for every iteration. The first and the last iteration of a phase
        are always printed.
      file: default standard error, so that standard output stays for results.

    Example:
      >>> with Progress() as progress:                       # doctest: +SKIP
      ...     progress.start("rl", total=80, done=12)
      ...     progress.update(13, {"acc": .41}, {"timing_s/gen": .6, "timing_s/step": .7})
      ...     progress.say("evaluated: accuracy .44")
    """

    def __init__(self, *, interval_s: float = 30.0, file: TextIO | None = None):
        self._file = file or sys.stderr
        self._interval_s = interval_s
        self._silent = jax.process_index() != 0
        self._terminal = not self._silent and hasattr(self._file, "isatty") and self._file.isatty()
        self._bar: tqdm | None = None
        self._phase, self._total, self._done = "", 0, 0

    def start(self, phase: str, total: int, done: int = 0) -> None:
        """Begins a phase of `total` iterations, `done` of which were done before (by the run that this one resumes)."""
        self._close_bar()
        self._phase, self._total, self._done = phase, total, done
        self._rate_s: float | None = None
        self._first = True
        self._last_time = time.monotonic()
        self._printed_time: float | None = None
        if self._terminal:
            layout = phase + " {n_fmt}/{total_fmt} |{bar:16}|  {desc}"  # not {postfix}: tqdm puts a comma before it
            # Some containers give a terminal of 0 columns or rows, in which tqdm would print nothing at all.
            size = {"dynamic_ncols": True} if all(os.get_terminal_size(self._file.fileno())) else {"ncols": 120, "nrows": 24}
            self._bar = tqdm(total=total, initial=done, file=self._file, bar_format=layout, **size)

    def update(self, done: int, metrics: Mapping[str, float] | None = None, timings: Mapping[str, float] | None = None) -> None:
        """After an iteration.

        Args:
          done: iterations of this phase done.
          metrics: the two or three numbers worth a look, by short name ("acc", "prm auc").
          timings: "timing_s/<name>" -> seconds; "timing_s/" is left out in print, "iteration" entirely.
        """
        if self._silent:
            return
        now = time.monotonic()
        if done > self._done:
            seconds = (now - self._last_time) / (done - self._done)
            if self._first:
                self._first = False
            else:
                self._rate_s = seconds if self._rate_s is None else 0.8 * self._rate_s + 0.2 * seconds
        self._last_time, self._done = now, done
        tail = self._tail(metrics or {}, timings or {})
        if self._bar is not None:
            self._bar.set_description_str(tail, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        if self._printed_time is None or done >= self._total or now - self._printed_time >= self._interval_s:
            self._printed_time = now
            print(f"{self._phase} {done}/{self._total}  {tail}".rstrip(), file=self._file, flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._silent:
            return
        if self._bar is not None:
            tqdm.write(text, file=self._file)
        else:
            print(text, file=self._file, flush=True)

    def close(self) -> None:
        self._close_bar()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _tail(self, metrics: Mapping[str, float], timings: Mapping[str, float]) -> str:
        parts = [f"{name} {number(value)}" for name, value in metrics.items()]
        if self._rate_s is not None:
            parts.append(f"{number(self._rate_s)} s/it")
            parts.append(f"ETA {duration(self._rate_s * max(self._total - self._done, 0))}")
        short = {name.removeprefix("timing_s/"): seconds for name, seconds in timings.items()}
        phases = " ".join(f"{name} {number(seconds, digits=1)}" for name, seconds in short.items() if name != "iteration")
        return "  ".join([*parts, phases] if phases else parts)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.refresh()  # tqdm skips updates that come too fast, the last one among them
            self._bar.close()
            self._bar = None


def number(value: float, digits: int = 2) -> str:
    """Short and stable in width: ".41", "1.31", "123", "3.2e-05"."""
    value = float(value)
    if not math.isfinite(value):
        return "non-finite"  # log watchers grep for a three-letter word; they must not kill a run that only skips an update
    if value != 0 and abs(value) < 0.5 * 10**-digits and digits > 1:
        return f"{value:.1e}"
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def duration(seconds: float) -> str:
    """As "9s", "1m29s", "3h05m" or "2d04h".

    Args:
      seconds: at least 0.
    """
    whole = int(round(seconds))
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{smaller}"
    return f"{whole}s"
