"""Exact numbers, math-verify, and functions of the user's in both calling conventions."""

import importlib.util
import json
import logging
from collections import Counter
from fractions import Fraction

import pytest

from jprm.errors import UserError
from jprm.tasks.sandbox import Reply
from jprm.tasks.task import Problem, Verdict
from jprm.tasks.verifiers import extract_number, make_verifier, plain_number, verdicts_of, verify_number
from tests.conftest import data_path, needs

NUMBERS = {
    "last in the text": ("He has 3, then 5 apples", 5),
    "gsm8k mark": ("so 7.\n#### 18", 18),
    "mark beats what follows below": ("#### 18\nnote 7", 18),
    "last mark": ("#### 18\n#### 19", 19),
    "boxed": (r"thus \boxed{42} of 50", 42),
    "boxed with text": (r"\boxed{42\text{ cm}}", 42),
    "nested box": (r"\boxed{\text{a}{7}} 9", 7),
    "answer": ("Answer: 12 of 30", 12),
    "answer in bold": ("**Answer:** 12", 12),
    "answer is": ("The answer is 12.", 12),
    "mark without a number": ("5 apples\nAnswer: none", None),
    "thousands": ("$1,234,567", 1234567),
    "not thousands": ("1,23", 23),
    "latex thousands": ("14{,}916", 14916),
    "decimals": ("2.50", Fraction(5, 2)),
    "point first": ("it is .5", Fraction(1, 2)),
    "trailing dot": ("It is 12.", 12),
    "negative": ("gives -5", -5),
    "negative dollars": ("-$5", -5),
    "dollars negative": ("$-5", -5),
    "unicode minus": ("\u22125", -5),
    "binary minus": ("8-3", 3),
    "binary minus, spaced": ("8 - 3 = 5", 5),
    "percent": ("50%", 50),
    "fraction": ("x = 3/4", Fraction(3, 4)),
    "division by zero": ("4 or 3/0", 4),
    "no exponent bomb": ("1e999999999", 999999999),
    "no number": ("none", None),
    "empty": ("", None),
    "endless digits": ("9" * 5000, None),
}


@pytest.mark.parametrize("text, value", NUMBERS.values(), ids=NUMBERS)
def test_extract_number(text, value):
    assert extract_number(text) == value


@pytest.mark.parametrize(
    "text, value",
    [("18", 18), ("18.0", 18), ("$1,300", 1300), ("50\\%", 50), ("-3/4", Fraction(-3, 4)), ("2,000.", 2000)]
    + [(text, None) for text in ("18 dollars", "\\frac{1}{3}", "x=3", "", "3 4", "(0,9)")],
)
def test_plain_number(text, value):
    assert plain_number(text) == value


def test_verify_number():
    answers = ["18", "18.0", "18", "1,000", "many"]
    texts = ["#### 18", "Answer: 18", "Answer: 18.01", "1000.00", "18"]
    verdicts = verify_number([Problem(0, "", a) for a in answers], texts)
    assert [v.score for v in verdicts] == [1, 1, 0, 1, 0]
    assert [v.known for v in verdicts] == [True, True, True, True, False]


def test_every_gsm8k_solution_is_right_by_its_own_answer():
    rows = [json.loads(line) for line in data_path("gsm8k/test.jsonl").open()]
    problems = [Problem(i, "", row["answer"].rpartition("#### ")[2]) for i, row in enumerate(rows)]
    assert all(v == Verdict(1.0) for v in verify_number(problems, [row["answer"] for row in rows]))


# --- math-verify -----------------------------------------------------------------------------------------------------------


def test_math_verify_agrees_with_its_own_test_cases_and_survives_a_power_tower():
    needs("math_verify", load=False)
    counts = Counter()
    verify, close = make_verifier("math_verify", timeout_s=10.0, workers=2, counts=counts)
    rows = [json.loads(line) for line in data_path("math_verify/test_cases_180.jsonl").open()]
    verdicts = verify([Problem(0, "", r["gold"]) for r in rows], [r["pred"] for r in rows])
    # The other five need options of the parser that its test file sets (decimal commas, strictness, float rounding).
    assert sum(v.score == r["expected"] for v, r in zip(verdicts, rows)) == 175
    assert all(v.known for v in verdicts) and not counts
    close()

    verify, close = make_verifier("math_verify", timeout_s=2.0, workers=2, counts=counts)
    texts = ["\\boxed{1}", "\\boxed{9^{9^{9^{9^9}}}}", "\\boxed{2}", "\\boxed{1}"]
    verdicts = verify([Problem(0, "", "1")] * 4, texts)
    close()
    assert verdicts == [Verdict(1.0), Verdict(0.0, known=False), Verdict(0.0), Verdict(1.0)]
    assert counts["timeout"] + counts["raised"] == 1  # killed at the limit, or at the limit of memory


def test_absent_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        make_verifier("math_verify", timeout_s=1, workers=1, counts=Counter())
    assert "math_verify" in error.value.found and error.value.expected == "the optional extra [verify]"
    assert error.value.where == "config.task.verifier" and error.value.fix == 'Run: pip install "jprm[verify]"'


# --- a user's function -----------------------------------------------------------------------------------------------------

USER_FILE = '''
import asyncio, time
from dataclasses import dataclass

@dataclass
class Part:
    weight: float = 0.5

def trl(prompts, completions, completion_ids, answer, colour, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer) == len(colour) == 1
    print("a user's function may print")
    return [1.0 if completions[0] == answer[0] and colour == ["red"] else Part().weight if completion_ids[0] == [7] else 0.0]

def chat(completions, **kwargs):
    return [float(completions[0][0]["content"] == kwargs["answer"][0] and kwargs["prompts"][0][0]["role"] == "user")]

async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth and data_source == "set" and extra_info["index"] == 4), "acc": 1}

def short(solution_str, ground_truth):
    return solution_str == ground_truth

def mixed(completions, **kwargs):
    match completions[0]:
        case "raise": raise RuntimeError("no luck")
        case "hang":
            while True: pass
        case "exit": raise SystemExit(3)
        case "die":
            import os; os._exit(9)
        case "none": return [None]
        case "nan": return [float("nan")]
        case text: return [float(text)]

def two(completions, **kwargs): return [1.0, 1.0]
def none_at_all(completions, **kwargs): return []
def number(completions, **kwargs): return 1.0
def text(completions, **kwargs): return ["1.0"]
def no_score(solution_str, ground_truth): return {"acc": 1.0}
def strange(a, b): return 1.0
'''


@pytest.fixture(scope="module")
def user_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "my_rewards.py"
    path.write_text(USER_FILE)
    return path


def verdicts(target, problems, responses, ids=None, counts=None, timeout_s=5.0):
    verify, close = make_verifier(target, timeout_s=timeout_s, workers=2, counts=Counter() if counts is None else counts)
    try:
        return verify(problems, responses, ids)
    finally:
        close()


def test_trl_signature(user_file):
    problems = [Problem(0, "p", "x", {"colour": "red"}), Problem(1, "p", "y", {"colour": "blue"})]
    out = verdicts(f"{user_file}:trl", problems * 2, ["x", "y", "no", "no"], [[1], [2], [7], [3]])
    assert out == [Verdict(1.0), Verdict(0.0), Verdict(0.5), Verdict(0.0)]


def test_trl_chat_and_coroutine(user_file):
    problem = Problem(0, [{"role": "user", "content": "?"}], "x")
    assert verdicts(f"{user_file}:chat", [problem] * 2, ["x", "y"]) == [Verdict(1.0), Verdict(0.0)]
    assert verdicts(f"{user_file}:later", [problem], ["x"]) == [Verdict(1.0)]


def test_verl_signature(user_file):
    problem = Problem(0, "p", "x", {"data_source": "set", "extra_info": {"index": 4}})
    assert verdicts(f"{user_file}:compute_score", [problem] * 2, ["x", "y"]) == [Verdict(1.0), Verdict(0.0)]
    assert verdicts(f"{user_file}:short", [problem] * 2, ["x", "y"]) == [Verdict(1.0), Verdict(0.0)]


def test_module_on_the_path(user_file, monkeypatch):
    monkeypatch.syspath_prepend(user_file.parent)
    assert verdicts("my_rewards:short", [Problem(0, "p", "x")], ["x"]) == [Verdict(1.0)]


def test_what_goes_wrong_in_one_row_stays_in_that_row(user_file, caplog):
    rows = ["1", "raise", "hang", "none", "0.25", "nan", "exit", "die", "raise", "1"]
    counts = Counter()
    with caplog.at_level(logging.WARNING):
        out = verdicts(f"{user_file}:mixed", [Problem(0, "p", "x")] * len(rows), rows, counts=counts, timeout_s=1.0)
    unknown = Verdict(0.0, known=False)
    expected = {"1": Verdict(1.0), "0.25": Verdict(0.25)}
    assert out == [expected.get(row, unknown) for row in rows]
    assert counts == {"raised": 3, "timeout": 1, "none": 1, "nan": 1, "crashed": 1}
    assert caplog.text.count("RuntimeError: no luck") == 1  # the first in full, the others counted


BAD_FUNCTIONS = {
    "two": ("2 values for 1 completion", "Return [score]"),
    "none_at_all": ("0 values for 1 completion", "Return [score]"),
    "number": ("1.0 for 1 completion", "Return [score]"),
    "text": ("a score of type str", "Return a float"),
    "no_score": ("a dict with the keys ['acc']", 'Return {"score": number}'),
    "strange": ("with parameters (a, b)", "Rename its parameters to one of the two forms"),
    "absent": ("no function 'absent'", "Name a function that the module has"),
}


@pytest.mark.parametrize("name", BAD_FUNCTIONS)
def test_bad_function(user_file, name):
    found, fix = BAD_FUNCTIONS[name]
    with pytest.raises(UserError) as error:
        verdicts(f"{user_file}:{name}", [Problem(0, "p", "x")], ["x"])
    assert found in error.value.found and error.value.fix == fix
    assert error.value.where == "config.task.verifier" and error.value.expected


def test_module_that_does_not_import(tmp_path):
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(UserError) as error:
        verdicts(f"{tmp_path}/broken.py:f", [], [])
    assert error.value.found == "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"


@pytest.mark.parametrize("name", ["no_such_module:f", "no/such/file.py:f", "exact"])
def test_unknown_verifier(name):
    with pytest.raises(UserError) as error:
        make_verifier(name, timeout_s=1, workers=1, counts=Counter())
    assert name.rpartition(":")[0] in error.value.found and error.value.where == "config.task.verifier"


def test_verdicts_count_each_reason():
    counts = Counter()
    replies = [Reply(1.0), Reply(error="timeout"), Reply(float("inf")), Reply(None)]
    assert [v.known for v in verdicts_of(replies, counts)] == [True, False, False, False]
    assert counts == {"timeout": 1, "nan": 1, "none": 1}
