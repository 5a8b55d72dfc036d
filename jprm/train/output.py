"""Files that verbs write for people: JSON lines that are there whole or not at all, and never over something else."""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jprm.errors import UserError


def check_new(path: str | os.PathLike, flag: str = "--out", *, folder: bool = False) -> pathlib.Path:
    """The path, if nothing is there yet. Asked before anything is loaded.

    Args:
      path: what the user has named.
      flag: by which option, for errors.
      folder: a folder is to be made: an empty one counts as nothing.

    Raises:
      UserError: something is there, or the folder it would be in is not.
    """
    path = pathlib.Path(path)
    if folder and path.is_dir() and not any(path.iterdir()):
        return path
    if path.exists():
        kind = ("a folder that is not empty" if folder else "a folder") if path.is_dir() else "an existing file"
        raise UserError(
            kind, expected="a name that is not taken", where=f"{flag}={path}", fix="Give another name, or remove what is there"
        )
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"no folder {path.parent}",
            expected="an existing folder to write into",
            where=f"{flag}={path}",
            fix=f"Make it: mkdir -p {path.parent}",
        )
    return path


@contextlib.contextmanager
def json_lines(path: pathlib.Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """``with json_lines(path) as write: write(row)``: rows go to a temporary name beside ``path``, which is renamed at the end.

    On an error nothing is left behind. Only process 0 writes. Numbers that are not finite become null.
    """
    if jax.process_index() != 0:
        yield lambda row: None
        return
    temporary = path.with_name(path.name + ".partial")
    try:
        with _told(path):
            file = temporary.open("w", encoding="utf-8")
        with file:

            def write(row: Mapping[str, Any]) -> None:
                with _told(path):
                    file.write(json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n")

            yield write
            with _told(path):
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)


@contextlib.contextmanager
def _told(path: pathlib.Path) -> Iterator[None]:
    """The file system's refusal as a sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"a file that cannot be written ({error.strerror})",
            expected="a writable folder with room",
            where=str(path),
            fix="Make room, or give another --out",
        ) from error


def plain(value: Any) -> Any:
    """JSON's own types: arrays as lists, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
