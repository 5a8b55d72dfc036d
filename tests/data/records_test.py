"""Reading rows: what is accepted, and what each kind of broken file says."""

import gzip
import json
import logging

import pyarrow
import pyarrow.parquet
import pytest

from jprm.data.records import Account, read_rows
from jprm.errors import UserError

ROWS = [{"a": 1, "b": "x\u2028y"}, {"a": 2, "b": "z"}]


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


GOOD = {
    "rows.jsonl": "\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS).encode(),
    "crlf.jsonl": b"\xef\xbb\xbf" + "\r\n\r\n".join(json.dumps(r) for r in ROWS).encode(),
    "list.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": "\n".join(json.dumps(r) for r in ROWS).encode(),
    "rows.jsonl.gz": gzip.compress("\n".join(json.dumps(r) for r in ROWS).encode()),
}


@pytest.mark.parametrize("name", GOOD)
def test_rows_and_their_places(tmp_path, name):
    path = write(tmp_path / name, GOOD[name])
    read = list(read_rows(path))
    assert [row for _, row in read] == ROWS
    assert read[0][0] == f"{path}:1" and read[1][0] == f"{path}:{3 if name.startswith('crlf') else 2}"


def test_parquet_with_nested_columns(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "1"}}] * 3
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [row for _, row in read_rows(tmp_path / "rows.parquet")] == rows


BAD = {
    "pointer.jsonl": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "", "Git LFS pointer", "git lfs pull"),
    "empty.jsonl": (b"", "", "an empty file", ""),
    "blank.jsonl": (b"\n\n", "", "a file without rows", "Give a file that holds data"),
    "none.json": (b"[]", "", "a file without rows", "Give a file that holds data"),
    "cut.jsonl": (b'{"a": 1}\n{"a": ', ":2", "text that is not JSON", "Mend the row or remove it"),
    "array.jsonl": (b'{"a": 1}\n[1]', ":2", "a list", "Write one JSON object per row"),
    "latin.jsonl": (b'{"a": "\xe9"}', "", "not UTF-8 at position 7", "Copy or download the file again"),
    "rows.csv": (b"a,b", "", "a file that ends in '.csv'", "Convert it"),
    "rows.parquet": (b"PAR1 but not really", "", "an unreadable Parquet file", "Copy or download the file again"),
    "rows.jsonl.gz": (b"\x1f\x8bno", "", "an unreadable file", "Copy or download the file again"),
}


@pytest.mark.parametrize("name", BAD)
def test_broken_files(tmp_path, name):
    content, place, found, fix = BAD[name]
    path = write(tmp_path / name, content)
    with pytest.raises(UserError) as error:
        list(read_rows(path))
    assert found in error.value.found and fix in error.value.fix
    assert error.value.where == f"{path}{place}" and error.value.expected


def test_absent_file(tmp_path):
    with pytest.raises(UserError) as error:
        list(read_rows(tmp_path / "no.jsonl"))
    assert error.value.found == "no file" and error.value.where == str(tmp_path / "no.jsonl")


def test_account_names_reasons_and_first_places(caplog):
    account = Account("problems")
    account.rows_in, account.rows_out = 5, 2
    for place in ("f:2", "f:3"):
        account.drop("with an empty prompt", place)
    account.drop("without an answer", "f:5")
    with caplog.at_level(logging.INFO):
        account.close("config.task.train")
    text = "problems: 5 rows in, 2 out; dropped 2 with an empty prompt (first f:2), 1 without an answer (first f:5)"
    assert text in caplog.text


def test_nothing_left_is_an_error():
    account = Account("problems")
    account.rows_in = 1
    account.drop("with an empty prompt", "f:1")
    with pytest.raises(UserError) as error:
        account.close("config.task.train")
    assert "1 with an empty prompt (first f:1)" in error.value.found and error.value.where == "config.task.train"
