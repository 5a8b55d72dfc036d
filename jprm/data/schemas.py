r"""What the columns of public data sets mean: questions with answers, labelled responses, and demonstrations.

Accepted as they are (column names found, not configured):

    verl              data_source, prompt [messages], reward_model {ground_truth}, extra_info
    TRL               prompt (text or messages), completion, label; messages
    plain             question | problem | input | query | instruction  with  answer | target | final_answer | ground_truth
    GSM8K             answer "... #### 18"
    MATH              problem, solution "... \boxed{18}", answer
    SVAMP             Body, Question, Equation, Answer
    UltraInteract,    response [a conversation], label
    EurusPRM-Stage1
    GSM8K's example_model_solutions    question and columns {"is_correct", "solution"}
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jprm.data.records import Account, Dropped, Row, read_rows
from jprm.errors import UserError

Prompt = str | list[dict[str, Any]]

PROMPT_COLUMNS = ("prompt", "question", "problem", "input", "query", "instruction", "Question")
ANSWER_COLUMNS = ("answer", "ground_truth", "target", "final_answer", "Answer", "solution")
RESPONSE_COLUMNS = ("response", "completion", "output")
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's annotations, which no reader should have to say
_BOXED = re.compile(r"\\boxed\s*\{")


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt with its ground truth; `solution` is the data's own worked solution or "", `equation` SVAMP's or ""."""

    prompt: Prompt
    answer: str
    solution: str
    equation: str
    columns: Row


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt, a response, and the response's outcome label (None for demonstrations)."""

    prompt: Prompt
    response: str
    label: int | None = None


@dataclasses.dataclass(frozen=True)
class Solution:
    """A prompt with a response, as one text or as its steps (then `response` is "")."""

    prompt: Prompt
    response: str
    steps: tuple[str, ...]
    columns: Row


def read_questions(
    paths: Sequence[str | pathlib.Path], account: Account, *, prompt_column: str = "", answer_column: str = ""
) -> Iterator[tuple[str, Question]]:
    """(place, question) from each usable row; the others are counted in `account`.

    Raises:
      UserError: no column of a file holds prompts or answers, or none has the name that is configured.
    """
    for path in paths:
        rows = list(read_rows(path))
        columns = {key for _, row in rows for key in row}
        for name, key in ((prompt_column, "prompt_column"), (answer_column, "answer_column")):
            if name and name not in columns:
                raise _no_column(path, columns, f"the column {name!r}", f"Set config.task.{key} to one of them")
        prompt = prompt_column or _first(PROMPT_COLUMNS, columns)
        answer = answer_column or ("reward_model" if "reward_model" in columns else _first(ANSWER_COLUMNS, columns))
        if not prompt:
            raise _no_column(path, columns, "a prompt: " + " | ".join(PROMPT_COLUMNS), "Set config.task.prompt_column")
        if not answer:
            raise _no_column(path, columns, "an answer: " + " | ".join(ANSWER_COLUMNS), "Set config.task.answer_column")
        yield from _usable(rows, account, lambda row: [_question(row, prompt, answer)])


def read_labelled(paths: Sequence[str | pathlib.Path]) -> list[Pair]:
    """Outcome-labelled responses for offline training of a reward model; rows in, out and dropped by reason go to the log.

    Raises:
      UserError: a file without any known form of label, or no usable row.
    """
    account = Account("labelled rows")
    pairs = []
    for path in paths:
        rows = list(read_rows(path))
        columns = {key for _, row in rows for key in row}
        judged = sorted({key for _, row in rows for key, one in row.items() if isinstance(one, dict) and "is_correct" in one})
        if "label" not in columns and not judged:
            raise _no_column(path, columns, "a column `label` with 0 or 1", "Add one", key="config.prm.data")
        pairs += [pair for _, pair in _usable(rows, account, lambda row: _judged(row, judged) if judged else [_labelled(row)])]
    account.close("config.prm.data")
    return pairs


def read_demonstrations(paths: Sequence[str | pathlib.Path]) -> list[Pair]:
    """Prompt/response rows for supervised training: prompt with response or completion, `messages`, or question with solution.

    Raises:
      UserError: no usable row.
    """
    account = Account("demonstrations")
    pairs = [pair for path in paths for _, pair in _usable(list(read_rows(path)), account, lambda row: [_demonstration(row)])]
    account.close("config.sft.data")
    return pairs


def read_prompts(
    path: str | pathlib.Path, account: Account, *, prompt_column: str = "", answer_column: str = ""
) -> Iterator[tuple[int, Question]]:
    """(0-based row, question) from each row that has a prompt; the answer is "" where the row, or the whole file, has none.

    Raises:
      UserError: no column holds prompts, or none has the name that is configured.
    """
    rows = list(read_rows(path))
    columns = {key for _, row in rows for key in row}
    prompt = prompt_column if prompt_column in columns else _first(PROMPT_COLUMNS, columns)
    if not prompt:
        raise _no_column(path, columns, "a prompt: " + " | ".join(PROMPT_COLUMNS), "Set config.task.prompt_column")
    found = "reward_model" if "reward_model" in columns else _first(ANSWER_COLUMNS, columns)
    known = answer_column if answer_column in columns else found

    def convert(row: Row) -> list[tuple[int, Question]]:
        try:
            return [_question(row, prompt, known)]
        except Dropped:
            return [Question(_prompt(row.get(prompt)), "", "", "", row)]

    yield from _numbered(rows, account, convert)


def read_solutions(path: str | pathlib.Path, account: Account) -> Iterator[tuple[int, "Solution"]]:
    """(0-based row, solution) from each row that holds a prompt, and a response or the list of its steps.

    Raises:
      UserError: no column of the file holds either.
    """
    rows = list(read_rows(path))
    columns = {key for _, row in rows for key in row}
    for names in (PROMPT_COLUMNS, ("steps", *RESPONSE_COLUMNS)):
        if not _first(names, columns) and not (names is PROMPT_COLUMNS and "response" in columns):
            raise _no_column(path, columns, "one of " + " | ".join(names), "Rename a column")
    yield from _numbered(rows, account, lambda row: [_solution(row)])


def question_key(prompt: Prompt) -> str:
    """What two prompts share that are the same question: the text of all messages, white space collapsed."""
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return " ".join(text.split())


# --- rows ------------------------------------------------------------------------------------------------------------------


def _usable(rows: list[tuple[str, Row]], account: Account, convert: Callable[[Row], list]) -> Iterator[tuple[str, Any]]:
    for place, row in rows:
        account.rows_in += 1
        try:
            converted = convert(row)
        except Dropped as reason:
            account.drop(str(reason), place)
            continue
        account.rows_out += 1
        yield from ((place, item) for item in converted)


def _numbered(rows: list[tuple[str, Row]], account: Account, convert: Callable[[Row], list]) -> Iterator[tuple[int, Any]]:
    for number, (place, row) in enumerate(rows):
        yield from ((number, item) for _, item in _usable([(place, row)], account, convert))


def _solution(row: Row) -> Solution:
    steps = row.get("steps")
    if steps is None:
        prompt, response = _prompt_and_response(row)
        return Solution(prompt, response, (), row)
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise Dropped("with steps that are not a list of texts")
    if not any(step.strip() for step in steps):
        raise Dropped("with an empty response")
    return Solution(_prompt(row.get(_first(PROMPT_COLUMNS, row))), "", tuple(steps), row)


def _no_column(path: Any, columns: set[str], expected: str, fix: str, key: str = "") -> UserError:
    found = f"the columns {', '.join(sorted(columns))} in {path}"
    return UserError(found, expected=expected, where=key or str(path), fix=fix)


def _first(names: Sequence[str], columns: Any) -> str:
    return next((name for name in names if name in columns), "")


def _question(row: Row, prompt_column: str, answer_column: str) -> Question:
    prompt = _prompt(row.get(prompt_column))
    if prompt_column == "Question" and isinstance(row.get("Body"), str):
        prompt = _join(row["Body"], prompt)
    raw = row.get(answer_column)
    if answer_column == "reward_model":
        raw = raw.get("ground_truth") if isinstance(raw, dict) else None
    solution = row.get("solution")
    if not isinstance(solution, str):
        solution = raw if isinstance(raw, str) and "####" in raw else ""
    equation = row.get("Equation")
    return Question(prompt, answer_text(raw), tidy_solution(solution), equation if isinstance(equation, str) else "", row)


def _join(body: str, question: str) -> str:
    """SVAMP's two halves: four bodies in ten end without a full stop."""
    body = body.strip()
    if not body or body[-1] in ".?!,":
        return f"{body} {question}".strip()
    return f"{body}{'.' if question[:1].isupper() else ','} {question}"


def _prompt(value: Any) -> Prompt:
    if value is None:
        raise Dropped("without a prompt")
    if isinstance(value, str):
        if not value.strip():
            raise Dropped("with an empty prompt")
        return value.strip()
    if not isinstance(value, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    ):
        raise Dropped(f"with a prompt that is neither text nor messages ({type(value).__name__})")
    if not any(m["content"].strip() for m in value):
        raise Dropped("with an empty prompt")
    if value[-1]["role"] == "assistant":
        raise Dropped("with a prompt that ends with the assistant's turn")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def answer_text(value: Any) -> str:
    r"""A ground truth as text: numbers in shortest form (43.0 -> "43"), what follows GSM8K's `####`, what `\boxed{}` holds."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        raise Dropped("without an answer")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Dropped(f"with an answer that is neither text nor a number ({type(value).__name__})")
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise Dropped("with an answer that is not finite")
        return str(int(value)) if value.is_integer() else repr(value)
    text = str(value)
    if "####" in text:
        text = text.rpartition("####")[2]
    elif boxes := list(_BOXED.finditer(text)):
        text = to_closing_brace(text[boxes[-1].end() :])
    if not text.strip():
        raise Dropped("with an empty answer")
    return text.strip()


def to_closing_brace(text: str) -> str:
    """What stands before the brace that closes one opened just before ``text``; all of it where none does."""
    depth = 1
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:position]
    return text


def tidy_solution(text: str) -> str:
    """A worked solution in the house form: without calculator annotations, and `Answer: 18` where GSM8K has `#### 18`."""
    return re.sub(r"####\s*", "Answer: ", _CALCULATOR.sub("", text)).strip()


def _response(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):  # TRL's chat completion
        value = value[0].get("content")
    if not isinstance(value, str):
        raise Dropped("without a response" if value is None else f"with a response that is not text ({type(value).__name__})")
    if not value.strip():
        raise Dropped("with an empty response")
    return value.rstrip("\n")


def _conversation(messages: list) -> tuple[Prompt, str]:
    if not messages or not isinstance(messages[-1], dict) or messages[-1].get("role") != "assistant":
        raise Dropped("with a conversation that does not end with the assistant's turn")
    return _prompt(messages[:-1] or None), _response(messages[-1].get("content"))


def _prompt_and_response(row: Row) -> tuple[Prompt, str]:
    column = _first(RESPONSE_COLUMNS, row)
    value = row.get(column)
    if isinstance(value, list) and len(value) > 1 and not _first(PROMPT_COLUMNS, row):
        return _conversation(value)  # UltraInteract keeps the whole conversation in `response`
    return _prompt(row.get(_first(PROMPT_COLUMNS, row))), _response(value)


def _labelled(row: Row) -> Pair:
    label = row.get("label")
    if isinstance(label, str):
        label = {"0": 0, "1": 1, "-": 0, "+": 1}.get(label.strip())
    if label not in (0, 1):  # True and 1.0 equal 1
        raise Dropped(f"with a label that is not 0 or 1 ({row.get('label')!r})")
    return Pair(*_prompt_and_response(row), label=int(label))


def _judged(row: Row, columns: Sequence[str]) -> list[Pair]:
    prompt = _prompt(row.get(_first(PROMPT_COLUMNS, row)))
    found = [row[c] for c in columns if isinstance(row.get(c), dict) and isinstance(row[c].get("is_correct"), bool)]
    if not found:
        raise Dropped("without a judged solution")
    return [Pair(prompt, tidy_solution(_response(one.get("solution"))), int(one["is_correct"])) for one in found]


def _demonstration(row: Row) -> Pair:
    if isinstance(row.get("messages"), list):
        return Pair(*_conversation(row["messages"]))
    if _first(RESPONSE_COLUMNS, row):
        return Pair(*_prompt_and_response(row))
    question = _question(row, _first(PROMPT_COLUMNS, row), _first(ANSWER_COLUMNS, row))
    if not question.solution:
        raise Dropped("without a response")
    return Pair(question.prompt, question.solution)
