"""Rows of public data files as they are, with an account of every row that was left out."""

import gzip
import json
import logging
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jprm.data.files import check_file
from jprm.errors import UserError

log = logging.getLogger(__name__)

Row = dict[str, Any]


class Dropped(Exception):
    """Why one row cannot be used; the reader counts it and goes on."""


class Account:
    """Rows in, out and dropped by reason, with the place of the first of each reason.

    Args:
      what: what the rows are to be ("problems", "labelled rows"), for the log.
    """

    def __init__(self, what: str):
        self.what, self.rows_in, self.rows_out = what, 0, 0
        self.dropped: Counter = Counter()
        self.first: dict[str, str] = {}

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, where)

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason} (first {self.first[reason]})" for reason, count in self.dropped.most_common())
        return f"{self.what}: {self.rows_in} rows in, {self.rows_out} out" + (f"; dropped {reasons}" if reasons else "")

    def close(self, where: str) -> None:
        """Logs the account. Raises UserError when nothing is left of it all."""
        log.info("%s", self)
        if not self.rows_out:
            raise UserError(
                f"no usable row among {self.rows_in} ({self})",
                expected=f"at least one of {self.what}",
                where=where,
                fix="Mend the rows, or name the right columns in config.task",
            )


def read_rows(path: str | pathlib.Path) -> Iterator[tuple[str, Row]]:
    """(place, row) for each row of a .jsonl, .json (a list, or one row a line), or .parquet file; .gz of the first two as well.

    `place` is "file:line" (1-based), or "file:row" where a format has no lines.

    Raises:
      UserError: absent, unreadable, empty, a Git LFS pointer, of no known kind, or broken at the place named.
    """
    path = check_file(path)
    kind = path.suffixes[-2] if path.suffix == ".gz" and len(path.suffixes) > 1 else path.suffix
    count = 0
    for place, row in {".parquet": _parquet, ".jsonl": _lines, ".json": _json}.get(kind, _unknown)(path):
        if not isinstance(row, dict):
            raise UserError(
                f"a {type(row).__name__}", expected="an object of columns", where=place, fix="Write one JSON object per row"
            )
        count += 1
        yield place, row
    if not count:
        raise UserError("a file without rows", expected="at least one row", where=str(path), fix="Give a file that holds data")


def _unknown(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    raise UserError(
        f"a file that ends in {path.suffix!r}",
        expected=".jsonl, .json or .parquet",
        where=str(path),
        fix="Convert it, or name it by its kind",
    )


def _text(path: pathlib.Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"bytes that are not UTF-8 at position {error.start}"
    except (OSError, EOFError) as error:
        found = f"an unreadable file ({error})"
    raise UserError(found, expected="UTF-8 text", where=str(path), fix="Copy or download the file again")


def _lines(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(_text(path).split("\n"), 1):  # not splitlines: U+2028 may stand inside a JSON string
        if line.strip():
            yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _json(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    text = _text(path)
    if not text.lstrip().startswith("["):  # many a .json on the hub holds one object a line
        yield from _lines(path)
        return
    for number, row in enumerate(_parse(text, str(path)), 1):
        yield f"{path}:{number}", row


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(
            f"text that is not JSON ({error})", expected="one JSON object", where=where, fix="Mend the row or remove it"
        ) from None


def _parquet(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"an unreadable Parquet file ({str(error).splitlines()[0]})",
            expected="a Parquet file",
            where=str(path),
            fix="Copy or download the file again",
        ) from None
