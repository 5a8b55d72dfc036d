"""Writing checkpoints while the run goes on.

A save copies the arrays to the host, returns, and is finished by a thread: Orbax writes, every process hashes and flushes its
files, process 0 writes the manifest and renames `000123.tmp` to `000123`: whatever instant the power goes, a numbered folder is
whole. On object stores nothing can be renamed: the files are written in place and the manifest, written last, is the commit.

Arrays are stored uncompressed. float32 weights shrink by 8 % only, and Orbax would hold every compressed chunk in memory until
all are written, a second copy of the state; what is stored as it is, it writes from the one copy that is there.
"""

import asyncio
import itertools
import json
import logging
import os
import re
import shutil
import threading
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from jprm.errors import UserError
from jprm.train import checkpoint, manifest
from jprm.train.exits import Stop, is_disk_full

_TMP, _ASIDE = ".tmp", ".aside"
_SUMS = re.compile(r"sums\.\d+\.json")  # how the other processes tell process 0 what they hashed; gone before the commit
_sync_number = itertools.count()
_log = logging.getLogger(__name__)


class Saver:
    """Saves states asynchronously, keeps the last few, and never hides that a save failed.

    A full disk: the unfinished files are removed, the run goes on with an error in the log, `failures` counts it; the second
    failure in a row raises `Stop("disk_full")` from the next `save` or `wait`. Every other error is raised there as it is.

    Args:
      directory: `<workdir>/checkpoints`; created by the first save.
      keep: newest checkpoints to keep, at least 1. An older one is removed only after a newer one is complete.
      keep_every: additionally keep every step that this divides.
      resumed_from: the step this run was restored at. Checkpoints beyond it belong to a history that this run does not continue
        (damaged ones that were passed over, or the run was told to start earlier): the first save renames them to `000123.aside`,
        lest the next resume mixes the two.

    Example:
      >>> with Saver("run/checkpoints", keep=2) as saver:    # doctest: +SKIP
      ...     saver.save(10, state, {"config": config})
    """

    def __init__(self, directory: epath.PathLike, *, keep: int, keep_every: int | None = None, resumed_from: int | None = None):
        if keep < 1:
            raise UserError(f"{keep}", expected="at least 1", where="config.checkpoint.keep", fix="Set config.checkpoint.keep=2")
        self.directory = manifest.absolute(directory)
        self.keep, self.keep_every = keep, keep_every
        self.failures = 0
        self._failures_in_a_row = 0
        self._committed = resumed_from
        self._resumed_from = -1 if resumed_from is None else resumed_from
        self._tidied = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.wait()
        except Exception as second:  # the first error is the one to tell
            _log.error("the last save failed as well: %s", second)

    @property
    def last_checkpoint(self) -> epath.Path | None:
        """The newest complete checkpoint of this run, including the one it was resumed from."""
        return None if self._committed is None else self._path(self._committed)

    # ----------------------------------------------------------------------------------------------------------- saving

    def save(self, step: int, state: Any, meta: dict) -> None:
        """Starts saving `state` as checkpoint `step`, after waiting for the save before it.

        When this returns the values are on the host: the state's buffers may be donated. A step that is saved is left alone.

        Args:
          step: iterations done. If the state has a `step`, it must be the same number.
          state: tree of arrays and typed PRNG keys; leaves may be sharded over devices and processes.
          meta: JSON values (an ml_collections config is one) to keep beside the arrays.

        Raises:
          Stop: "disk_full", for the second save in a row that found no space.
          Exception: the error of the save before this one.
        """
        self.wait()
        if step == self._committed:
            return
        if hasattr(state, "step") and int(state.step) != step:
            raise ValueError(f"checkpoint {step} of a state at step {int(state.step)}: N is the state after N iterations")
        leaves = checkpoint.leaves_by_name(state)
        text = json.dumps(
            {
                **meta,
                "step": step,
                "code": checkpoint.code_version(),
                "processes": jax.process_count(),
                "devices": jax.device_count(),
                "leaves": {name: checkpoint.describe(leaf) for name, leaf in leaves.items()},
            },
            indent=1,
            default=_plain,
        )
        arrays = {name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for name, leaf in leaves.items()}
        arrays = {name: leaf for name, leaf in arrays.items() if leaf.size}  # `restore` makes the empty ones
        target = self._target(step)
        try:
            if jax.process_index() == 0:
                self._tidy(target)
                target.mkdir(parents=True)
            _together("created")
            with _uncompressed():
                written = ocp.save_async(target / checkpoint.ARRAYS, arrays)
        except Exception as error:
            self._failed(step, target, error)
            self.wait()
            return
        self._thread = threading.Thread(target=self._finish, args=(step, target, written, text), name=f"save-{step}")
        self._thread.start()

    def wait(self) -> bool:
        """Waits for the save in flight. True if the newest save is complete; False if it found no space (see `failures`).

        Raises:
          Stop, Exception: as `save`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is None:
            return not self._failures_in_a_row
        if not is_disk_full(error):
            raise error
        if self._failures_in_a_row >= 2:
            raise Stop("disk_full", f"two saves in a row found no space in {self.directory}: {_first_line(error)}") from error
        return False

    def _finish(self, step: int, target: epath.Path, written: Any, text: str) -> None:
        try:
            written.result()
            process = jax.process_index()
            if process == 0:
                (target / checkpoint.META).write_text(text)
            _together("written")
            names = [name for name in manifest.files_under(target) if _owner(name) == process and not _SUMS.fullmatch(name)]
            sums = manifest.hash_files(target, names, flush=True)
            if process > 0:
                (target / f"sums.{process}.json").write_text(json.dumps(sums))
            _together("hashed")
            if process == 0:
                for other in range(1, jax.process_count()):
                    theirs = target / f"sums.{other}.json"
                    sums.update(json.loads(theirs.read_text()))
                    theirs.unlink()
                manifest.write_manifest(target, step, sums)
                if target != self._path(step):
                    target.rename(self._path(step))
                    manifest.fsync_folder(self.directory)
            _together("committed")
            if not (self._path(step) / manifest.MANIFEST).exists():  # process 0 failed after the last time all spoke
                raise OSError(f"process 0 did not complete checkpoint {step}")
            self._committed, self._failures_in_a_row = step, 0
        except Exception as error:
            self._failed(step, target, error)
            return
        try:
            if jax.process_index() == 0:
                self._retain(step)
        except OSError as error:  # the checkpoint is complete; too many old ones are no reason to stop
            _log.warning("an old checkpoint could not be removed: %s", error)

    def _failed(self, step: int, target: epath.Path, error: BaseException) -> None:
        self._error = error
        self.failures += 1
        self._failures_in_a_row += 1
        if jax.process_index() == 0:
            shutil.rmtree(os.fspath(target), ignore_errors=True) if not manifest.is_object_store(target) else _remove(target)
        if is_disk_full(error):
            kept = self.last_checkpoint or "there is none yet"
            _log.error(
                "NO SPACE for checkpoint %d in %s (%s). The run goes on; newest complete checkpoint: %s. "
                "Make room: a second failure in a row ends the run.",
                step,
                self.directory,
                _first_line(error),
                kept,
            )

    # ------------------------------------------------------------------------------------------------ folders and retention

    def _path(self, step: int) -> epath.Path:
        return self.directory / f"{step:06d}"

    def _target(self, step: int) -> epath.Path:
        path = self._path(step)
        return path if manifest.is_object_store(path) else path.with_name(path.name + _TMP)

    def _tidy(self, target: epath.Path) -> None:
        """Before a save, left-overs of killed saves go; before the first, a future this run does not continue is set aside."""
        if self.directory.is_dir():
            for path in list(self.directory.iterdir()):
                if path.name.endswith(_TMP):
                    _remove(path)
        if not self._tidied:
            for path in checkpoint.numbered(self.directory):
                if int(path.name) > self._resumed_from:
                    self._set_aside(path)
        self._tidied = True
        if target.exists():
            _remove(target)

    def _set_aside(self, path: epath.Path) -> None:
        if manifest.is_object_store(path) and not (path / manifest.MANIFEST).exists():
            _remove(path)  # there, no manifest is what a killed save looks like
            return
        set_aside(path)

    def _retain(self, newest: int) -> None:
        whole = [path for path in checkpoint.latest(self.directory) if int(path.name) <= newest]
        for path in whole[self.keep :]:
            if self.keep_every and int(path.name) % self.keep_every == 0:
                continue
            if manifest.is_object_store(path):
                (path / manifest.MANIFEST).unlink()  # first, so that a half-removed one never counts as complete
                _remove(path)
            else:
                _remove(path.rename(path.with_name(path.name + _TMP)))


def set_aside(path: epath.PathLike) -> None:
    """Renames a file or folder of another history to `<name>.aside`, or `<name>.aside-2` … where there is one; says so."""
    path = epath.Path(path)
    names = (f"{path.name}{_ASIDE}{suffix}" for suffix in itertools.chain([""], (f"-{i}" for i in itertools.count(2))))
    aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(aside)
    _log.warning("%s is not part of this run's history; renamed to %s", path, aside.name)


def check_space(directory: epath.PathLike, abstract_state: Any, keep: int) -> None:
    """Before a run: is there room for the checkpoints it will keep, and may we write there at all? Local disks only.

    Args:
      directory: `<workdir>/checkpoints`; created if missing.
      abstract_state: the state, or its `jax.eval_shape`.
      keep: as `Saver`; one more than this exists while a save is in flight.

    Raises:
      UserError: with the bytes that are missing.
    """
    if manifest.is_object_store(directory):
        return
    try:
        os.makedirs(directory, exist_ok=True)
        probe = os.path.join(directory, f"probe{_TMP}")
        os.makedirs(probe, exist_ok=True)
        os.rmdir(probe)
    except OSError as error:
        raise UserError(
            f"{error.strerror} ({os.fspath(directory)})",
            expected="a folder that can be written",
            where="config.workdir",
            fix="Name a folder you may write to",
        ) from error
    size = checkpoint.state_bytes(abstract_state)
    needed = size * max(1, keep + 1 - len(checkpoint.latest(directory)))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise UserError(
            f"{free / 2**20:.0f} MiB free in {os.fspath(directory)}",
            expected=f"{needed / 2**20:.0f} MiB ({size / 2**20:.0f} MiB each, {keep} kept and one being written)",
            where="config.workdir",
            fix="Make room, lower config.checkpoint.keep, or name a workdir on a larger disk",
        )


def _owner(name: str) -> int:
    """The process that wrote a file: Orbax writes into `ocdbt.process_3/` and the like; the rest is process 0's."""
    for part in name.split("/"):
        head, _, number = part.rpartition("process_")
        if number.isdigit() and (head == "" or head.endswith(".")) and int(number) < jax.process_count():
            return int(number)
    return 0


def _together(what: str) -> None:
    """A barrier of all processes through the coordination service: unlike `sync_global_devices` it runs nothing on the devices,
    so it is safe in a thread beside the training step. Every process passes here in the same order: the counter agrees."""
    number = next(_sync_number)
    if jax.process_count() > 1:
        asyncio.run(ocp.multihost.sync_global_processes(f"jprm_{what}", operation_id=f"jprm-save-{number}"))


def _uncompressed() -> ocp.Context:
    context = ocp.Context()
    context.array.saving.use_compression = False
    return context


def _remove(path: epath.Path) -> None:
    path.rmtree() if path.is_dir() else path.unlink()


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]


def _plain(value: Any) -> Any:
    """JSON for what configs and metrics are made of besides plain values."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no place in meta.json")
