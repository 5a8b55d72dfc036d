"""The file task: mixtures, splits, duplicates, the choice of a verifier; on written files and on the real word problems."""

import json

import pytest
from ml_collections import ConfigDict

from jprm.errors import UserError
from jprm.tasks.files import hash_share
from jprm.tasks.task import Verdict, make_task
from tests.conftest import data_path, needs


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def config(**kwargs):
    return ConfigDict({"name": "file", "train": (), "eval": (), "split_by_hash": 0.0, "verifier": "auto", **kwargs})


def rows(n, start=0):
    return [{"question": f"What is {i} + 1?", "answer": f"{i + 1}"} for i in range(start, start + n)]


def test_a_mixture_of_files_with_its_own_eval_file(tmp_path, caplog):
    caplog.set_level("INFO")
    parts = {"a": rows(5), "b": [{"input": "What is 9?", "target": 9.0}], "c": rows(2, 3)}
    train = tuple(write(tmp_path / f"{name}.jsonl", part) for name, part in parts.items())
    task = make_task(config(train=train, eval=(write(tmp_path / "d.jsonl", rows(2, 4)),)))
    assert [p.prompt for p in task.eval] == ["What is 4 + 1?", "What is 5 + 1?"]  # kept here, so not trained on
    assert [p.answer for p in task.train] == ["1", "2", "3", "4", "9"] and [p.index for p in task.train] == [0, 1, 2, 3, 4]
    assert task.separator == "\n" and "10 rows in, 7 out; dropped 3 repeating a question" in caplog.text
    assert task.verify([task.train[0]] * 2, ["Answer: 1", "Answer: 2"]) == [Verdict(1.0), Verdict(0.0)]
    assert task.demonstration(task.train[2], 0) == "2 + 1 = 3\nAnswer: 3" and task.first_error(task.train[0], "") is None


def test_split_by_hash_depends_on_the_question_alone(tmp_path):
    both = (write(tmp_path / "a.jsonl", rows(200)), write(tmp_path / "b.jsonl", rows(200, 100)))
    task = make_task(config(train=both, split_by_hash=0.2))
    held_out, train = ({p.prompt for p in split} for split in (task.eval, task.train))
    assert len(held_out) + len(train) == 300 == len(held_out | train) and 40 < len(held_out) < 80
    alone = make_task(config(train=both[1], split_by_hash=0.2))
    assert {p.prompt for p in alone.eval} <= held_out and {p.prompt for p in alone.train} <= train
    assert all(hash_share(text) < 0.2 for text in held_out)
    assert hash_share("") == int("e3b0c44298fc1c14", 16) / 2**64  # SHA-256 of nothing


def test_auto_takes_math_verify_where_answers_are_no_numbers(tmp_path, caplog):
    needs("math_verify", load=False)
    caplog.set_level("INFO")
    path = write(tmp_path / "a.jsonl", [*rows(2), {"question": "Half?", "answer": "\\frac{1}{2}"}])
    task = make_task(config(train=path, verifier_timeout_s=20.0))
    assert task.verify([task.train[2]] * 2, ["\\boxed{0.5}", "\\boxed{0.6}"]) == [Verdict(1.0), Verdict(0.0)]
    assert "verifier math_verify" in caplog.text
    task.close()
    task = make_task(config(train=path, verifier="number"))
    assert len(task.train) == 2 and "1 with an answer that is not a number" in caplog.text


def test_a_users_verifier_sees_the_columns(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, colour, **kw): return [float(completions[0] == colour[0])]")
    path = write(tmp_path / "a.jsonl", [{"prompt": "Which?", "answer": "x", "colour": "red"}])
    task = make_task(config(train=path, verifier=f"{tmp_path}/mine.py:f"))
    assert task.verify([task.train[0]] * 2, ["red", "blue"]) == [Verdict(1.0), Verdict(0.0)]
    task.close()


BAD = {
    "no file": (dict(), "config.task.train", "no file"),
    "share of 1": (dict(train="a.jsonl", split_by_hash=1.0), "config.task.split_by_hash", "1.0"),
    "two ways to hold out": (dict(train="a.jsonl", eval="a.jsonl", split_by_hash=0.2), "config.task.split_by_hash", "both"),
    "same file twice": (dict(train="a.jsonl", eval="a.jsonl"), "config.task.train", "no problem in the train split"),
    "nothing held out": (dict(train="a.jsonl", split_by_hash=1e-9), "config.task.split_by_hash", "no problem in the eval split"),
    "an option": (dict(train="a.jsonl", options={"operations": 3}), "config.task.options.operations", "option 'operations'"),
    "verifier": (dict(train="a.jsonl", verifier="exact"), "config.task.verifier", "verifier 'exact'"),
}


@pytest.mark.parametrize("settings, where, found", BAD.values(), ids=BAD)
def test_bad_settings(tmp_path, monkeypatch, settings, where, found):
    write(tmp_path / "a.jsonl", rows(3))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        make_task(config(**settings))
    assert error.value.where == where and error.value.found.startswith(found) and error.value.expected and error.value.fix


NAMES = {"arithmatic": "arithmetic", "files": "file", "reasoning-gym:gcd": "reasoning_gym:chain_sum"}


@pytest.mark.parametrize("name, near", NAMES.items())
def test_unknown_task(name, near):
    with pytest.raises(UserError) as error:
        make_task(ConfigDict({"name": name}))
    assert error.value.where == "config.task.name" and error.value.fix == f"Set config.task.name={near!r}"
    assert name in error.value.found and "reasoning_gym:<task>" in error.value.expected


def test_word_problems():
    folder = data_path("word_problems")
    train = tuple(str(folder / f"{name}.jsonl") for name in ("multiarith", "addsub", "svamp_test"))
    task = make_task(config(train=train, split_by_hash=0.2))
    assert (len(task.train), len(task.eval)) == (1615, 360)  # of 1,995: MultiArith repeats 20 of its own
    worked = [(p, text) for p in [*task.train, *task.eval] if (text := task.demonstration(p, 0)) is not None]
    assert len(worked) == 1830 and all(v == Verdict(1.0) for v in task.verify(*zip(*worked)))
    assert all(line.count("=") == 1 for _, text in worked for line in text.split("\n")[:-1])


def test_gsm8k_and_math():
    needs("math_verify", load=False)
    files = dict(train=str(data_path("gsm8k/train.jsonl")), eval=str(data_path("gsm8k/test.jsonl")))
    task = make_task(config(**files))
    assert (len(task.train), len(task.eval)) == (7473, 1319) and "<<" not in task.demonstration(task.train[0], 0)
    math = make_task(config(train=str(data_path("math500/MATH500.jsonl")), split_by_hash=0.2, verifier_timeout_s=20.0))
    some = math.eval[:20]
    assert all(v == Verdict(1.0) for v in math.verify(some, [math.demonstration(p, 0) for p in some]))
    math.close()
