"""The run's folder: whose it is, and one process that writes into it at a time."""

import errno
import fcntl
import json
import logging
import os
import pathlib
import socket

import jax
import numpy as np
from jax.experimental import multihost_utils

from jprm.errors import UserError
from jprm.train import checkpoint, exits
from jprm.train.metrics import METRICS, TENSORBOARD
from jprm.train.same_run import check_same_run
from jprm.train.saver import set_aside
from jprm.train.setup import Run

CONFIG, LOCK = "config.json", "lock"
_NEW = CONFIG + ".new"
LENGTHS = (("sft", "steps"), ("prm", "steps"), ("rl", "iterations"))  # of the phases
log = logging.getLogger(__name__)


class WorkdirLock:
    """Holds a workdir against a second process: two runs in one would write into each other's metrics and checkpoints.

    The operating system's lock on `<workdir>/lock` (flock), which ends with the process, however that ends; what the file says is
    only for people. A file system that cannot lock stops no run: a warning says so.
    """

    def __init__(self):
        self._file = None

    def acquire(self, workdir: os.PathLike) -> None:
        """Takes the lock at once or not at all.

        Raises:
          UserError: another process has it.
          OSError: the file cannot be opened or written.
        """
        file = open(os.path.join(workdir, LOCK), "a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(
                    f"a run that is still going on ({holder})",
                    expected="a workdir that no other process writes into",
                    where=str(workdir),
                    fix="Wait for that run or stop it, or give another config.workdir",
                ) from error
            log.warning("%s cannot be locked (%s): nothing keeps a second run out of it", workdir, error.strerror)
            return
        self._file = file
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()

    def release(self) -> None:
        """Lets the next one in. The file stays: removing it could take it from a process that is just opening it."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def prepare_workdir(run: Run, lock: WorkdirLock) -> pathlib.Path:
    """Makes the run's folder, or recognises it as this run's own, and locks it. Process 0 looks and speaks for all.

    A folder without a checkpoint holds nothing that another config would be mixed with. It takes the new config (a smaller
    micro-batch after out-of-memory, say), and what the earlier start measured is renamed to `*.aside`.

    Raises:
      UserError: it belongs to a run of another config, another process writes into it, or it cannot be written.
    """
    refusal = None
    if jax.process_index() == 0:
        try:
            _prepare(run, lock)
        except UserError as error:
            refusal = error
    if jax.process_count() > 1:
        refused = bool(np.max(multihost_utils.process_allgather(np.int32(refusal is not None))))
        if refused and refusal is None:
            refusal = UserError(
                "a workdir that process 0 refused",
                expected="the folder of this run, or a new one",
                where=str(run.workdir),
                fix="Do what the message of process 0 says",
            )
    if refusal is not None:
        raise refusal
    run.workdir.mkdir(parents=True, exist_ok=True)  # process i writes its log there
    return run.workdir


def _prepare(run: Run, lock: WorkdirLock) -> None:
    workdir, config = run.workdir, run.config.to_dict()
    try:
        _takes_over(workdir, config)  # before anything is created: another's folder is left as it is
        workdir.mkdir(parents=True, exist_ok=True)
        lock.acquire(workdir)
        starts_anew = _takes_over(workdir, config)  # again under the lock: nobody can save a first checkpoint now
        exits.clear_report(workdir)
        if starts_anew:
            for path in (workdir / METRICS, workdir / "samples", workdir / TENSORBOARD):
                if path.exists() and (path.is_dir() or path.stat().st_size):
                    set_aside(path)
        (workdir / _NEW).write_text(json.dumps(config, indent=2) + "\n")
        os.replace(workdir / _NEW, workdir / CONFIG)  # a kill leaves the old one or the new one
    except OSError as error:
        raise UserError(
            f"a folder that cannot be written ({error.strerror})",
            expected="a writable folder",
            where=str(workdir),
            fix="Give another config.workdir",
        ) from error


def _stored(workdir: pathlib.Path) -> dict | None:
    """The config of the run whose folder this is; None where there is no run yet."""
    stored = workdir / CONFIG
    if not stored.exists():
        if workdir.exists() and (not workdir.is_dir() or {p.name for p in workdir.iterdir()} - {LOCK, _NEW}):
            raise UserError(
                "something that is no jprm run",
                expected="a new or empty folder, or an earlier run of this config",
                where=str(workdir),
                fix="Give another config.workdir",
            )
        return None
    try:
        theirs = json.loads(stored.read_text())
        if not isinstance(theirs, dict) or not {"model", "task", "rl"} <= theirs.keys():
            raise ValueError("a config.json of something else")
    except ValueError as error:
        raise UserError(
            "a config.json that jprm did not write",
            expected="the config of the run",
            where=str(stored),
            fix="Give another config.workdir",
        ) from error
    return theirs


def _takes_over(workdir: pathlib.Path, config: dict) -> bool:
    """True if there is a run that has no checkpoint, and another config: this one, which then starts anew."""
    theirs = _stored(workdir)
    if theirs is None:
        return False
    done = checkpoint.numbered(workdir / "checkpoints")
    try:
        check_same_run(theirs, config, where=str(workdir))
    except UserError:
        if done:
            raise
        check_same_run(theirs, config, where=str(workdir), free=tuple(config))  # logs what changed
        log.info("%s has no checkpoint: the run starts with the new config", workdir)
        return True
    total, newest = sum(config[phase][name] for phase, name in LENGTHS), int(done[0].name) if done else 0
    if newest > total:
        raise UserError(
            f"a checkpoint of iteration {newest}",
            expected=f"at most {total}, the iterations of this config",
            where=str(workdir / "checkpoints"),
            fix=f"Set config.rl.iterations={config['rl']['iterations'] + newest - total} or more, or give a new config.workdir",
        )
    return False
