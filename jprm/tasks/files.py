"""Problems from prompt files: read, made unique, split, and given a verifier."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jprm.data.records import Account
from jprm.data.schemas import Question, question_key, read_questions
from jprm.errors import UserError
from jprm.tasks.task import Problem, Task, check_options, task_options
from jprm.tasks.verifiers import make_verifier, plain_number
from jprm.tasks.worked import from_equation, from_numbers

log = logging.getLogger(__name__)

SEPARATOR = "\n"


def file_task(config: Any) -> Task:
    """The task of `config.task` with name "file".

    Args:
      config: `train` and `eval` are tuples of paths (.jsonl, .json, .parquet; one path or several, which are mixed);
        `split_by_hash` in (0, 1) holds that share of `train` out by the SHA-256 of the question instead of reading `eval`;
        `prompt_column` and `answer_column` override the columns found; `verifier` is "auto" (exact numbers where every answer is
        one, else math-verify), "number", "math_verify" or a function of the user's; `separator` ends a step, "\\n" where empty.

    A question that occurs again, in whatever file, is dropped, so that none is in both splits; the evaluation files keep theirs.

    Raises:
      UserError: no file, both or neither way to hold out, unreadable files, missing columns, no usable row.
    """
    check_options(task_options(config), [])
    share = float(config.get("split_by_hash") or 0.0)
    _check(config, share)
    counts: Counter = Counter()
    account = Account("problems")  # its count of rows out is set at the end: rows go for reasons of ours as well
    columns = {"prompt_column": config.get("prompt_column") or "", "answer_column": config.get("answer_column") or ""}
    seen: set[str] = set()
    # The evaluation files first: what they hold is not trained on.
    held_out = _unique(read_questions(_paths(config.get("eval")), account, **columns), account, seen)
    train = _unique(read_questions(_paths(config.get("train")), account, **columns), account, seen)
    if share:
        held_out = [question for question in train if hash_share(question_key(question.prompt)) < share]
        train = [question for question in train if hash_share(question_key(question.prompt)) >= share]
    name = config.get("verifier") or "auto"
    if name == "auto":
        numeric = all(plain_number(question.answer) is not None for question in [*train, *held_out])
        name = "number" if numeric else "math_verify"
        log.info("verifier %s: %s", name, "every answer is a number" if numeric else "not every answer is a plain number")
    if name == "number":
        train, held_out = (_numeric(questions, account) for questions in (train, held_out))
    account.rows_out = len(train) + len(held_out)
    account.close("config.task.train")
    for split, questions in (("train", train), ("eval", held_out)):
        if not questions and (split == "train" or share or _paths(config.get("eval"))):
            raise UserError(
                f"no problem in the {split} split ({account})",
                expected="at least one",
                where="config.task.split_by_hash" if share else f"config.task.{split}",
                fix="Give more rows" if share else "Give files that do not repeat the other split",
            )
    verify, close = make_verifier(
        name, timeout_s=config.get("verifier_timeout_s", 5.0), workers=config.get("verifier_workers", 1), counts=counts
    )
    problems = {split: [_problem(i, q) for i, q in enumerate(qs)] for split, qs in (("train", train), ("eval", held_out))}
    return Task(
        name="file",
        train=problems["train"],
        eval=problems["eval"],
        separator=config.get("separator") or SEPARATOR,
        verify=verify,
        demonstration=_Demonstrations([*train, *held_out]),
        counts=counts,
        close=close,
    )


def _paths(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) and value else tuple(value or ())


def _check(config: Any, share: float) -> None:
    if not _paths(config.get("train")):
        raise UserError(
            "no file", expected="at least one prompt file", where="config.task.train", fix='Set config.task.train=("path.jsonl",)'
        )
    if not 0.0 <= share < 1.0:
        raise UserError(f"{share}", expected="a share in [0, 1)", where="config.task.split_by_hash", fix="Set it to 0.2")
    if share and _paths(config.get("eval")):
        raise UserError(
            "both config.task.eval and a share to hold out",
            expected="one of the two",
            where="config.task.split_by_hash",
            fix="Set config.task.split_by_hash=0, or leave config.task.eval empty",
        )


def _unique(questions: Iterable[tuple[str, Question]], account: Account, seen: set[str]) -> list[Question]:
    kept = []
    for place, question in questions:
        key = question_key(question.prompt)
        if key in seen:
            account.drop("repeating a question", place)
        else:
            seen.add(key)
            kept.append(question)
    return kept


def _numeric(questions: list[Question], account: Account) -> list[Question]:
    kept = []
    for question in questions:
        if plain_number(question.answer) is None:
            account.drop("with an answer that is not a number", repr(question.answer))
        else:
            kept.append(question)
    return kept


def _problem(index: int, question: Question) -> Problem:
    return Problem(index=index, prompt=question.prompt, answer=question.answer, columns=question.columns)


class _Demonstrations:
    """problem, draw -> the data's own solution, or a short one made from its equation or its numbers, or None.

    Made on demand and kept: only a warm start asks, and then for every problem many times.
    """

    def __init__(self, questions: list[Question]):
        self.questions = {question_key(question.prompt): question for question in questions}
        self.made: dict[str, str | None] = {}

    def __call__(self, problem: Problem, draw: int) -> str | None:
        key = question_key(problem.prompt)
        if key not in self.made:
            self.made[key] = self._make(self.questions[key])
        return self.made[key]

    @staticmethod
    def _make(question: Question) -> str | None:
        if question.solution:
            return question.solution
        answer = plain_number(question.answer)
        if answer is None or not isinstance(question.prompt, str):
            return None
        return from_equation(question.equation, answer) if question.equation else from_numbers(question.prompt, answer)


def hash_share(question: str) -> float:
    """Where in [0, 1) the SHA-256 of a question falls: the same on every machine, in every mixture, for ever."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8]) / 2**64
