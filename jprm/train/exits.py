"""How a run ends: causes, exit codes, signals, and the last word a scheduler reads.

| cause         | code | resumable | meaning                                                                     |
|---------------|------|-----------|-----------------------------------------------------------------------------|
| done          | 0    | no        | every iteration was done                                                    |
| crash         | 1    | yes       | an exception nobody expected; the traceback is in run.log                   |
| user_error    | 2    | no        | a `UserError`: something to change first, named in the message              |
| disk_full     | 74   | yes       | two saves in a row found no space (sysexits' EX_IOERR)                      |
| preempted     | 75   | yes       | SIGTERM or a preemption notice: saved, then left (EX_TEMPFAIL: try again)   |
| non_finite    | 76   | yes       | too many iterations in a row had a non-finite loss or gradient              |
| out_of_memory | 77   | no        | the device or host had too little memory for this config                    |
| interrupted   | 130  | yes       | Ctrl-C: saved, then left; a second Ctrl-C leaves at once, without a save    |

The codes are stable: a scheduler may requeue on 1, 74 and 75. "resumable" says whether the same command can go on from the last
checkpoint; a run that has none is never resumable. SIGKILL leaves no report: a missing `exit_report.json` means exactly that.
"""

import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from typing import NamedTuple

import jax
from etils import epath

from jprm.errors import UserError


class Exit(NamedTuple):
    code: int
    resumable: bool


EXITS = {
    "done": Exit(0, False),
    "crash": Exit(1, True),
    "user_error": Exit(2, False),
    "disk_full": Exit(74, True),
    "preempted": Exit(75, True),
    "non_finite": Exit(76, True),
    "out_of_memory": Exit(77, False),
    "interrupted": Exit(130, True),
}
REPORT = "exit_report.json"
_log = logging.getLogger(__name__)


class Stop(Exception):
    """Ends a run for a known cause.

    Args:
      cause: a key of `EXITS`.
      message: one sentence for the user.
    """

    def __init__(self, cause: str, message: str):
        if cause not in EXITS:
            raise ValueError(f"cause {cause!r} is none of {sorted(EXITS)}")
        self.cause = cause
        super().__init__(message)


def cause_of(error: BaseException) -> str:
    """The cause (a key of `EXITS`) that an exception stands for."""
    if isinstance(error, Stop):
        return error.cause
    if isinstance(error, UserError):
        return "user_error"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if is_disk_full(error):
        return "disk_full"
    if isinstance(error, MemoryError) or (isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)):
        return "out_of_memory"
    return "crash"


def is_disk_full(error: BaseException) -> bool:
    """True if an exception, or one it was raised from, means "no space" or "quota exceeded".

    TensorStore reports the operating system's number only inside the text of a ValueError, hence the search in it.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in (28, 122):  # ENOSPC, EDQUOT
            return True
        if any(mark in str(error) for mark in ("No space left on device", "os_error_code='28'", "os_error_code='122'")):
            return True
        error = error.__cause__ or error.__context__
    return False


class StopSignals:
    """Turns SIGTERM and Ctrl-C into a flag that the loop polls once an iteration.

    With several processes they have to agree on the iteration they stop at, else the next collective never ends. JAX's
    preemption service does that (it takes SIGTERM itself and passes the news on), so there SIGTERM is left to it and Ctrl-C is
    passed on as SIGTERM.

    Example:
      >>> with StopSignals() as signals:                     # doctest: +SKIP
      ...     for step in range(steps):
      ...         state = train_step(state)
      ...         if signals.stop_requested(step): break     # signals.cause is "preempted" or "interrupted"
    """

    def __init__(self):
        self.cause: str | None = None
        self._previous = {}

    def __enter__(self) -> "StopSignals":
        # Signals can only be taken in the main thread; elsewhere (a notebook's worker, a test) the flag just never rises.
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupted)
            if not _several_processes():
                self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminated)
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _terminated(self, number, frame) -> None:
        self.cause = self.cause or "preempted"

    def _interrupted(self, number, frame) -> None:
        if self.cause == "interrupted":
            raise KeyboardInterrupt
        self.cause = "interrupted"
        sys.stderr.write("\ninterrupted: saving at the end of this iteration (Ctrl-C again leaves at once, without a save)\n")
        if _several_processes():
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_requested(self, step: int) -> bool:
        """True once the run should save and leave. With several processes, every one must call this after every iteration.

        Args:
          step: iterations done; the same number on every process.
        """
        if not _several_processes():
            return self.cause is not None
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):
            self.cause = self.cause or "preempted"
            return True
        return False


def _several_processes() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def finish(
    workdir: epath.PathLike | None,
    cause: str,
    *,
    step: int,
    last_checkpoint: epath.PathLike | None = None,
    resume_command: str | None = None,
    message: str = "",
) -> int:
    """Writes `<workdir>/exit_report.json` and prints the run's last line; process 0 only. Never raises.

        JPRM_EXIT cause=preempted step=123 resumable=yes

    Args:
      workdir: None if the run ended before it had one: then only the line is printed.
      cause: a key of `EXITS`.
      step: iterations done.
      last_checkpoint: newest complete checkpoint, if any.
      resume_command: what to type to go on; default: this process' own command line, since resuming is the default.
      message: one sentence, or an exception's text.

    Returns:
      The exit code for `sys.exit`.
    """
    code, resumable = EXITS[cause]
    resumable = resumable and last_checkpoint is not None
    if jax.distributed.is_initialized() and jax.process_index() != 0:
        return code
    report = {
        "cause": cause,
        "code": code,
        "step": int(step),
        "last_checkpoint": None if last_checkpoint is None else os.fspath(last_checkpoint),
        "resumable": resumable,
        "resume_command": (resume_command or own_command()) if resumable else None,
        "message": message,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if workdir is not None:
        try:
            (epath.Path(workdir) / REPORT).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk must not cost the exit code
            _log.warning("%s could not be written: %s", REPORT, error)
    sys.stdout.flush()
    sys.stderr.flush()
    print(f"JPRM_EXIT cause={cause} step={int(step)} resumable={'yes' if resumable else 'no'}", flush=True)
    return code


def clear_report(workdir: epath.PathLike) -> None:
    """Removes an earlier run's report, at the start of a run: from then on a missing report means "killed, or still running"."""
    (epath.Path(workdir) / REPORT).unlink(missing_ok=True)


def own_command() -> str:
    """The command line of this process, quoted for a shell."""
    program = sys.argv[0]
    if program.endswith("__main__.py"):
        return shlex.join([os.path.basename(sys.executable), "-m", "jprm", *sys.argv[1:]])
    return shlex.join([os.path.basename(program), *sys.argv[1:]])
