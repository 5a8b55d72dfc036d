"""Is this file what it says it is? Asked before anything is read from it."""

import json
import pathlib
from typing import Any

from jprm.errors import UserError

_LFS = b"version https://git-lfs.github.com"


def check_file(path: str | pathlib.Path) -> pathlib.Path:
    """The path, if a non-empty regular file is there.

    Raises:
      UserError: nothing there, a directory, an empty file, or the pointer that Git LFS leaves in place of a large file.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        found = "a directory" if path.is_dir() else "no file"
        raise UserError(found, expected="a readable file", where=str(path), fix="Give the path of an existing file")
    try:
        with path.open("rb") as f:
            start = f.read(len(_LFS))
    except OSError as e:
        raise UserError(
            f"an unreadable file ({e.strerror})", expected="a readable file", where=str(path), fix="Make the file readable"
        ) from e
    if not start:
        raise UserError("an empty file", expected="data", where=str(path), fix="Copy or download the file again")
    if start == _LFS:
        raise UserError(
            "a Git LFS pointer (the large file itself was never fetched)",
            expected="the file's content",
            where=str(path),
            fix="Run `git lfs pull` where it was cloned",
        )
    return path


def read_json(path: str | pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      UserError: as :func:`check_file`, or the content is not one JSON object.
    """
    path = check_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(
            f"text that is not JSON ({e})", expected="a JSON object", where=str(path), fix="Copy or download the file again"
        ) from e
    if not isinstance(value, dict):
        raise UserError(
            f"a JSON {type(value).__name__}", expected="a JSON object", where=str(path), fix="Copy or download the file again"
        )
    return value
