"""What a run measures, on disk: `metrics.jsonl` always, TensorBoard beside it, and the text log `run.log`.

    {"step": 12, "phase": "rl", "time_s": 31.4, "critic/score/mean": 0.41, "prm/loss": 0.63, "actor/loss": null}

`step` counts iterations over all phases. A value that is not finite is written as null with its key kept: JSON has no NaN, and a
missing key would look like a metric that was not measured. After a resume the file is the history of one run: rows beyond the
restored step are cut, as is a row that a kill left half-written.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

METRICS, TENSORBOARD, LOG = "metrics.jsonl", "tb", "run.log"


class MetricsWriter:
    """Appends rows; process 0 only, a no-op elsewhere.

    Args:
      workdir: of the run; must exist.
      resumed_from: the step this run was restored at; rows of later steps are cut. 0 or None: the run starts, the file is empty.
      tensorboard: also write `<workdir>/tb` (through tensorboardX).
    """

    def __init__(self, workdir: os.PathLike | str, *, resumed_from: int | None = None, tensorboard: bool = True):
        self._file = self._board = None
        if jax.process_index() != 0:
            return
        path = os.path.join(workdir, METRICS)
        rows = cut_history(path, resumed_from or 0)
        seconds = rows[-1].get("time_s", 0.0) if rows else 0.0
        self._start = time.monotonic() - seconds  # time_s goes on where the restored history ends
        self._file = open(path, "a", encoding="utf-8", buffering=1)
        if tensorboard:
            from tensorboardX import SummaryWriter  # its import takes a second that runs without it need not wait

            self._board = SummaryWriter(os.path.join(workdir, TENSORBOARD), purge_step=(resumed_from or 0) + 1)

    def write(self, step: int, phase: str, metrics: Mapping[str, Any]) -> None:
        """One row.

        Args:
          step: iterations done over all phases.
          phase: "sft", "prm", "rl" or "eval".
          metrics: "<group>/<name>" -> number (Python, numpy or a scalar array; fetching an array waits for the device, so pass
            those of the iteration before).

        Raises:
          TypeError: a value is no single number.
        """
        if self._file is None:
            return
        values = {name: scalar(name, value) for name, value in metrics.items()}
        row: dict[str, Any] = {"step": int(step), "phase": phase, "time_s": round(time.monotonic() - self._start, 3)}
        row.update({name: value if math.isfinite(value) else None for name, value in values.items()})
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        if self._board is not None:
            prefix = "eval/" if phase == "eval" else ""
            for name, value in values.items():
                if not math.isfinite(value):  # a gap in the curve; tensorboardX would warn at each
                    continue
                self._board.add_scalar(name if name.startswith(prefix) else prefix + name, value, int(step))

    def flush(self) -> None:
        """Hands everything to the operating system, at checkpoints and at the end."""
        if self._file is not None:
            self._file.flush()
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def scalar(name: str, value: Any) -> float:
    """A Python float of a number or an array of one element."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biufV":  # V: ml_dtypes such as bfloat16
        raise TypeError(
            f"metric {name!r} is {type(value).__name__} of shape {array.shape} and dtype {array.dtype}, not one number"
        )
    return float(array.reshape(()).astype(np.float64))


def read_metrics(path: os.PathLike | str) -> list[dict[str, Any]]:
    """All whole rows of a `metrics.jsonl`, in order; none if there is no file. A half-written last row is left out."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1] if line]  # what follows the last newline is not whole


def cut_history(path: os.PathLike | str, step: int) -> list[dict[str, Any]]:
    """Keeps the rows up to `step` and returns them. The file is replaced in one go: a kill leaves the old one or the new one."""
    rows = [row for row in read_metrics(path) if step and row["step"] <= step]
    new = f"{os.fspath(path)}.new"
    with open(new, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(new, path)
    return rows


class RunLog:
    """Sends the log to `<workdir>/run.log` (process i > 0: `run.<i>.log`), and warnings to the terminal too, above a running bar.

    `jprm` logs from INFO on, libraries from WARNING on. A resumed run appends.

    Example:
      >>> with RunLog(workdir):                              # doctest: +SKIP
      ...     logging.getLogger("jprm").info("started")
    """

    def __init__(self, workdir: os.PathLike | str):
        index = jax.process_index()
        file = logging.FileHandler(os.path.join(workdir, LOG if index == 0 else f"run.{index}.log"), encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        file.addFilter(lambda record: record.levelno >= (logging.INFO if record.name.startswith("jprm") else logging.WARNING))
        self._handlers = [file]
        if index == 0:
            terminal = _AboveTheBar(logging.WARNING)
            terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
            self._handlers.append(terminal)

    def __enter__(self) -> "RunLog":
        self._level = logging.getLogger("jprm").level
        logging.getLogger("jprm").setLevel(logging.INFO)
        for handler in self._handlers:
            logging.getLogger().addHandler(handler)
        return self

    def __exit__(self, *exc) -> None:
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
        logging.getLogger("jprm").setLevel(self._level)


class EarlyLog(logging.Handler):
    """Holds back what is logged before a run has a folder: which rows were dropped, say. Nothing of it is lost.

    :meth:`hand_over` gives it to the handlers that are there by then (`RunLog`'s). Where there never is a folder, because the
    config is refused, warnings go to the terminal.
    """

    def __init__(self):
        super().__init__(logging.INFO)
        self._records: list[logging.LogRecord] = []
        self.addFilter(lambda record: record.name.startswith("jprm"))

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def __enter__(self) -> "EarlyLog":
        self._level = logging.getLogger("jprm").level
        logging.getLogger("jprm").setLevel(logging.INFO)
        logging.getLogger("jprm").addHandler(self)
        return self

    def hand_over(self) -> None:
        logging.getLogger("jprm").removeHandler(self)
        for record in self._records:
            logging.getLogger(record.name).handle(record)
        self._records.clear()

    def __exit__(self, *exc) -> None:
        logging.getLogger("jprm").removeHandler(self)
        logging.getLogger("jprm").setLevel(self._level)
        for record in self._records:
            if record.levelno >= logging.WARNING:
                logging.lastResort.handle(record)


class _AboveTheBar(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
