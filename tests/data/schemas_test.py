"""Public schemas as they are: the same question, label or demonstration out of each, and every unusable row counted."""

import json
import re

import pytest

from jprm.data.records import Account
from jprm.data.schemas import Pair, question_key, read_demonstrations, read_labelled, read_questions, tidy_solution
from jprm.errors import UserError
from tests.conftest import data_path

USER = [{"role": "user", "content": "How many?"}]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def questions(path, **columns):
    account = Account("problems")
    return [question for _, question in read_questions([path], account, **columns)], account


VERL = {"data_source": "s", "prompt": USER, "reward_model": {"style": "rule", "ground_truth": "18"}, "extra_info": {"index": 3}}
SCHEMAS = {
    "verl": (VERL, USER, "18"),
    "verl, list of one": ({**VERL, "reward_model": {"ground_truth": ["18"]}}, USER, "18"),
    "trl chat": ({"prompt": USER, "solution": "so \\boxed{18}."}, USER, "18"),
    "trl text": ({"prompt": "How many?", "ground_truth": 18}, "How many?", "18"),
    "gsm8k": ({"question": "How many?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}, "How many?", "18"),
    "math": ({"problem": "How many?", "solution": "\\boxed{17}", "answer": "\\frac{1}{2}"}, "How many?", "\\frac{1}{2}"),
    "boxed, nested": ({"problem": "How many?", "solution": "\\boxed{3} and \\boxed{\\frac{1}{2}}"}, "How many?", "\\frac{1}{2}"),
    "word problems": ({"input": " How many? ", "target": 43.0}, "How many?", "43"),
    "decimal": ({"input": "How many?", "target": 9.43}, "How many?", "9.43"),
    "svamp": (
        {"Body": "In 2 groups", "Question": "How many?", "Answer": 145.0, "Equation": "( 290.0 / 2.0 )"},
        "In 2 groups. How many?",
        "145",
    ),
    "svamp, full stop": ({"Body": "2 groups.", "Question": "How many?", "Answer": 1.0}, "2 groups. How many?", "1"),
    "svamp, one sentence": ({"Body": "If so", "Question": "how many?", "Answer": 1.0}, "If so, how many?", "1"),
}


@pytest.mark.parametrize("row, prompt, answer", SCHEMAS.values(), ids=SCHEMAS)
def test_questions(tmp_path, row, prompt, answer):
    (question,), account = questions(write(tmp_path / "rows.jsonl", [row]))
    assert (question.prompt, question.answer) == (prompt, answer)
    assert question.columns == row and account.rows_in == account.rows_out == 1


def test_solutions_and_equations_are_kept(tmp_path):
    rows = [SCHEMAS["gsm8k"][0]], [SCHEMAS["math"][0]], [SCHEMAS["svamp"][0]]
    gsm8k, math, svamp = (questions(write(tmp_path / "rows.jsonl", r))[0][0] for r in rows)
    assert gsm8k.solution == "9 * 2 = 18\nAnswer: 18" and math.solution == "\\boxed{17}"
    assert svamp.solution == "" and svamp.equation == "( 290.0 / 2.0 )"


def test_columns_can_be_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "no", "answer": "no", "q": "yes", "gold": 7}])
    (question,), _ = questions(path, prompt_column="q", answer_column="gold")
    assert (question.prompt, question.answer) == ("yes", "7")


DROPS = {
    "empty prompt": ({"prompt": "  ", "answer": "1"}, "with an empty prompt"),
    "no prompt": ({"answer": "1"}, "without a prompt"),
    "number as prompt": ({"prompt": 7, "answer": "1"}, "neither text nor messages (int)"),
    "messages without role": ({"prompt": [{"content": "x"}], "answer": "1"}, "neither text nor messages (list)"),
    "no messages": ({"prompt": [], "answer": "1"}, "with an empty prompt"),
    "assistant last": ({"prompt": [*USER, {"role": "assistant", "content": "5"}], "answer": "1"}, "ends with the assistant's"),
    "null answer": ({"prompt": "x", "answer": None}, "without an answer"),
    "empty answer": ({"prompt": "x", "answer": " "}, "with an empty answer"),
    "answer of a wrong type": ({"prompt": "x", "answer": {"a": 1}}, "neither text nor a number (dict)"),
    "answer true": ({"prompt": "x", "answer": True}, "neither text nor a number (bool)"),
    "answer NaN": ({"prompt": "x", "answer": float("nan")}, "not finite"),
}


@pytest.mark.parametrize("row, reason", DROPS.values(), ids=DROPS)
def test_unusable_rows_are_counted_with_their_place(tmp_path, row, reason):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "good", "answer": "1"}, row])
    kept, account = questions(path)
    assert [q.prompt for q in kept] == ["good"] and account.rows_in == 2 and account.rows_out == 1
    ((found, count),) = account.dropped.items()
    assert reason in found and count == 1 and account.first[found] == f"{path}:2"


MISSING = {
    "no prompt": ([{"text": "x", "answer": "1"}], {}, "a prompt: prompt | question", "Set config.task.prompt_column"),
    "no answer": ([{"prompt": "x", "text": "1"}], {}, "an answer: answer | ground_truth", "Set config.task.answer_column"),
    "named": ([{"prompt": "x", "answer": "1"}], {"answer_column": "gold"}, "the column 'gold'", "Set config.task.answer_column"),
}


@pytest.mark.parametrize("rows, named, expected, fix", MISSING.values(), ids=MISSING)
def test_missing_columns(tmp_path, rows, named, expected, fix):
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError) as error:
        questions(path, **named)
    assert error.value.expected.startswith(expected) and error.value.fix.startswith(fix)
    assert error.value.where == str(path) and ", ".join(sorted(rows[0])) in error.value.found


def test_same_question_same_key():
    assert question_key("How  many?\n") == question_key([{"role": "user", "content": "How many?"}]) == "How many?"
    assert question_key("How many") != question_key("How many?")


def test_tidy_solution():
    assert tidy_solution("2+1=<<2+1=3>>3 bolts\n#### 3") == "2+1=3 bolts\nAnswer: 3"


# --- labelled rows and demonstrations --------------------------------------------------------------------------------------

CHAT = [*USER, {"role": "assistant", "content": "18"}]
TOOL = [{"role": "assistant", "content": "print(9*2)"}, {"role": "user", "content": "18"}]
MANY_TURNS = [*USER, *TOOL, {"role": "assistant", "content": "18."}]
LABELLED = {
    "plain": ({"prompt": "How many?", "response": "18", "label": 1}, Pair("How many?", "18", 1)),
    "trl unpaired": ({"prompt": USER, "completion": [CHAT[1]], "label": False}, Pair(USER, "18", 0)),
    "float": ({"question": "How many?", "completion": "18", "label": 1.0}, Pair("How many?", "18", 1)),
    "sign": ({"question": "How many?", "completion": "18", "label": "-"}, Pair("How many?", "18", 0)),
    "ultrainteract": (
        {"response": CHAT, "label": 1, "instruction dataset": "s", "generator model": "m"},
        Pair(USER, "18", 1),
    ),
    "ultrainteract, turns": ({"response": MANY_TURNS, "label": 0, "instruction dataset": "s"}, Pair(MANY_TURNS[:3], "18.", 0)),
}


@pytest.mark.parametrize("row, pair", LABELLED.values(), ids=LABELLED)
def test_labelled(tmp_path, row, pair):
    assert read_labelled([write(tmp_path / "rows.jsonl", [row])]) == [pair]


BAD_LABELLED = {
    "label 2": {"prompt": "x", "response": "y", "label": 2},
    "no label": {"prompt": "x", "response": "y"},
    "label -100": {"prompt": "x", "response": "y", "label": -100},
    "empty response": {"prompt": "x", "response": " ", "label": 1},
    "no response": {"prompt": "x", "label": 1},
    "ends with the user": {"response": MANY_TURNS[:3], "label": 1},
}


@pytest.mark.parametrize("row", BAD_LABELLED.values(), ids=BAD_LABELLED)
def test_unusable_labelled_rows_are_dropped(tmp_path, row, caplog):
    caplog.set_level("INFO")
    assert read_labelled([write(tmp_path / "rows.jsonl", [LABELLED["plain"][0], row])]) == [LABELLED["plain"][1]]
    assert "2 rows in, 1 out; dropped 1 with" in caplog.text and "rows.jsonl:2" in caplog.text


def test_rows_without_labels_are_an_error(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x", "response": "y"}])
    with pytest.raises(UserError) as error:
        read_labelled([path])
    assert error.value.where == "config.prm.data" and str(path) in error.value.found and "label" in error.value.expected


def test_gsm8k_model_solutions():
    path = data_path("gsm8k/example_model_solutions_400.jsonl")
    pairs = read_labelled([path])
    assert len(pairs) == 1600 and 0.2 < sum(p.label for p in pairs) / 1600 < 0.8
    assert not any(re.search("<<[0-9+*/=.-]+>>", p.response) for p in pairs)  # some models wrote broken ones; those stay
    assert len({p.prompt for p in pairs}) == 400 and pairs[0].prompt == pairs[3].prompt


DEMONSTRATIONS = {
    "response": ({"prompt": "How many?", "response": "18"}, Pair("How many?", "18")),
    "completion": ({"prompt": USER, "completion": [CHAT[1]]}, Pair(USER, "18")),
    "messages": ({"messages": MANY_TURNS}, Pair(MANY_TURNS[:3], "18.")),
    "gsm8k": (SCHEMAS["gsm8k"][0], Pair("How many?", "9 * 2 = 18\nAnswer: 18")),
}


@pytest.mark.parametrize("row, pair", DEMONSTRATIONS.values(), ids=DEMONSTRATIONS)
def test_demonstrations(tmp_path, row, pair):
    assert read_demonstrations([write(tmp_path / "rows.jsonl", [row])]) == [pair]


def test_no_usable_demonstration_is_an_error(tmp_path):
    with pytest.raises(UserError) as error:
        read_demonstrations([write(tmp_path / "rows.jsonl", [{"prompt": "x", "answer": "5"}, {"messages": USER}])])
    assert error.value.where == "config.sft.data" and "no usable row among 2" in error.value.found
