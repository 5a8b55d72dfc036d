"""What decides whether a response is right: exact numbers, math-verify, or a function of the user's."""

import asyncio
import importlib
import importlib.util
import inspect
import logging
import math
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jprm.data.schemas import to_closing_brace
from jprm.errors import UserError
from jprm.tasks.sandbox import Reply, Sandbox
from jprm.tasks.task import Problem, Verdict

log = logging.getLogger(__name__)

WHERE = "config.task.verifier"
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")

# --- exact number ----------------------------------------------------------------------------------------------------------

# A minus right after a digit, a letter or a bracket is an operator, not a sign: "8-3" ends in 3.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}.])(?P<sign>[-+])\s?)?(?:[$€£](?P<inner>-)?)?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?P<decimals>\.[0-9]+)?(?:/(?P<below>[0-9]+)(?![0-9./]))?"
)
_MARKER = re.compile(r"####|\\boxed\s*\{|\b(?:final )?answer(?: is)?\s*[:=]|\banswer is\b", re.IGNORECASE)
MAX_DIGITS = 400  # longer texts of digits are no answer, and `int` refuses them from 4,300 on


def extract_number(text: str) -> Fraction | None:
    r"""The number that a text gives as its answer, exactly.

    The rule: after the last of the markers `####`, `\boxed{`, `Answer:` (also `answer is`), the first number that follows, in the
    same line or, for a box, inside its braces; a marker without a number is no answer. Without a marker, the last number of the
    text. Thousands separators, currency signs, a trailing dot and `%` are dropped ("50%" is 50); "-$5" and "$-5" are -5; "3/4" is
    three quarters; ".5" is one half. Exponents are not read.

    Example:
      >>> extract_number("16 - 3 = 13, so #### 1,300.50")
      Fraction(2601, 2)
    """
    text = _plain(text)
    markers = list(_MARKER.finditer(text))
    if markers:
        rest = text[markers[-1].end() :]
        rest = to_closing_brace(rest) if markers[-1][0].endswith("{") else rest.lstrip(" *:").partition("\n")[0]
        return next((value for match in _NUMBER.finditer(rest) if (value := _value(match)) is not None), None)
    found = [value for match in _NUMBER.finditer(text) if (value := _value(match)) is not None]
    return found[-1] if found else None


def plain_number(text: str) -> Fraction | None:
    """The number that a ground truth *is* ("$1,300", "18.0", "50%", "3/4"), or None where it is or holds anything else."""
    match = _NUMBER.fullmatch(_plain(text).strip().rstrip("$%.").strip())
    return _value(match) if match else None


def _plain(text: str) -> str:
    """Unicode minus and LaTeX's ways to write separators and signs, in ASCII."""
    return text.replace("\u2212", "-").replace("{,}", ",").replace(",\\!", ",").replace("\\$", "$").replace("\\%", "%")


def _value(match: re.Match) -> Fraction | None:
    whole, decimals, below = match["whole"].replace(",", ""), match["decimals"] or "", match["below"] or "1"
    if len(whole) + len(decimals) + len(below) > MAX_DIGITS or int(below) == 0:
        return None
    value = Fraction((whole or "0") + decimals) / int(below)
    return -value if (match["sign"] == "-") != bool(match["inner"]) else value


def verify_number(problems: Sequence[Problem], responses: Sequence[str], response_ids: Any = None) -> list[Verdict]:
    """1 where the response's number (`extract_number`) equals the answer (`plain_number`) exactly: 18, 18.0 and $18 are equal."""
    del response_ids
    verdicts = []
    for problem, response in zip(problems, responses, strict=True):
        expected = plain_number(problem.answer)
        verdicts.append(Verdict(float(extract_number(response) == expected), known=expected is not None))
    return verdicts


# --- math-verify -----------------------------------------------------------------------------------------------------------


def math_verify_call() -> Callable[[tuple[str, str]], float]:
    """(gold, response) -> 1.0 where math-verify holds them equal. Made inside a sandbox process."""
    from math_verify import parse, verify

    # Its own time-outs are alarms, which the evaluation of a power tower does not see; ours replace them, and it need not warn.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def call(item: tuple[str, str]) -> float:
        gold_text, response = item
        gold = parse(f"${gold_text}$", parsing_timeout=None) or parse(gold_text, parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot read the ground truth {gold_text!r}")
        return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))

    return call


# --- a user's function -----------------------------------------------------------------------------------------------------


def user_call(target: str) -> Callable[[dict[str, Any]], float | None]:
    """The user's function behind one calling convention. Made inside a sandbox process.

    Args:
      target: "module:function" or "path/to/file.py:function". By its parameters' names it is taken as TRL's
        `f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]`, called with lists of one row, or as verl's
        `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float}`.

    Raises:
      UserError: no such function, or parameters of neither kind.
    """
    function = _load(target)
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if {"solution_str", "ground_truth"} <= set(named):
        return lambda row: _one_score(_run(function, _accepted(_verl_arguments(row), named, takes_any)))
    if "completions" in named or takes_any:
        return lambda row: _only_score(_run(function, _accepted(_trl_arguments(row), named, takes_any)))
    raise UserError(
        f"{target} with parameters ({', '.join(parameters)})",
        expected="TRL's (prompts, completions, **columns) or verl's (data_source, solution_str, ground_truth, extra_info)",
        where=WHERE,
        fix="Rename its parameters to one of the two forms",
    )


def _load(target: str) -> Callable:
    source, _, name = target.rpartition(":")
    if source.endswith(".py"):
        path = pathlib.Path(source).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickles in it look themselves up by name
        sys.path.insert(0, str(path.parent))  # its neighbours, as if it had been run from there
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"no function {name!r} in {source}",
            expected="one of " + ", ".join(found) if found else "a module with functions",
            where=WHERE,
            fix="Name a function that the module has",
        )
    return function


def _verl_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    columns = row["columns"]
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": row["response"],
        "ground_truth": row["answer"],
        "extra_info": columns.get("extra_info"),
    }


def _trl_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    chat = not isinstance(row["prompt"], str)  # TRL gives chat completions to functions whose prompts are chats
    completion = [{"role": "assistant", "content": row["response"]}] if chat else row["response"]
    columns = {"answer": row["answer"], **row["columns"]}
    return {
        **{key: [value] for key, value in columns.items() if key not in ("prompt", "prompts", "completion", "completions")},
        "prompts": [row["prompt"]],
        "completions": [completion],
        "completion_ids": [row["response_ids"]],
    }


def _accepted(arguments: dict[str, Any], named: Sequence[str], takes_any: bool) -> dict[str, Any]:
    return arguments if takes_any else {key: value for key, value in arguments.items() if key in named}


def _run(function: Callable, arguments: dict[str, Any]) -> Any:
    result = function(**arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _only_score(values: Any) -> float | None:
    if not hasattr(values, "__len__") or isinstance(values, (str, Mapping)) or len(values) != 1:
        found = f"{len(values)} values" if hasattr(values, "__len__") and not isinstance(values, str) else repr(values)
        raise UserError(
            f"{found} for 1 completion", expected="a list with one number per completion", where=WHERE, fix="Return [score]"
        )
    return _one_score(values[0])


def _one_score(value: Any) -> float | None:
    if isinstance(value, Mapping):
        if "score" not in value:
            raise UserError(
                f"a dict with the keys {sorted(map(str, value))}",
                expected='a dict with the key "score"',
                where=WHERE,
                fix='Return {"score": number}',
            )
        value = value["score"]
    if value is None:
        return None
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"a score of type {type(value).__name__}", expected="a number or None", where=WHERE, fix="Return a float"
        ) from None


# --- from config -----------------------------------------------------------------------------------------------------------


def make_verifier(
    name: str, *, timeout_s: float, workers: int, counts: Counter
) -> tuple[Callable[..., list[Verdict]], Callable[[], None]]:
    """The verifier of that name, loaded and ready, and what ends its processes.

    Args:
      name: "number", "math_verify", "module:function" or "path/to/file.py:function".
      timeout_s: wall limit of one response in seconds.
      workers: processes at most.
      counts: where responses without a verdict are counted by reason.

    Returns:
      (verify, close); verify(problems, responses, response_ids=None) -> one Verdict each.
    """
    if name == "number":
        return verify_number, lambda: None
    if name == "math_verify":
        needs_extra("math_verify", "verify", WHERE, 'pip install "jprm[verify]"')
        box = Sandbox("jprm.tasks.verifiers:math_verify_call", timeout_s=timeout_s, workers=workers)

        def items(problems, responses, response_ids):
            return [(p.answer, r) for p, r in zip(problems, responses, strict=True)]

    elif ":" in name:
        _check_target(name)
        box = Sandbox("jprm.tasks.verifiers:user_call", (name,), timeout_s=timeout_s, workers=workers, memory_bytes=0)

        def items(problems, responses, response_ids):
            ids = [None] * len(problems) if response_ids is None else [[int(i) for i in row] for row in response_ids]
            return [
                {"prompt": p.prompt, "answer": p.answer, "columns": dict(p.columns), "response": r, "response_ids": i}
                for p, r, i in zip(problems, responses, ids, strict=True)
            ]

    else:
        raise UserError(
            f"verifier {name!r}",
            expected='"auto", "number", "math_verify", "module:function" or "path/to/file.py:function"',
            where=WHERE,
            fix='Set config.task.verifier="number"',
        )
    box.start()

    def verify(problems: Sequence[Problem], responses: Sequence[str], response_ids: Any = None) -> list[Verdict]:
        return verdicts_of(box.call(items(problems, responses, response_ids)), counts)

    return verify, box.close


def _check_target(target: str) -> None:
    source = target.rpartition(":")[0]
    if source.endswith(".py"):
        present = pathlib.Path(source).is_file()
    else:
        try:
            present = importlib.util.find_spec(source) is not None
        except (ImportError, ValueError):
            present = False
    if not present:
        raise UserError(
            f"no file {source!r}" if source.endswith(".py") else f"no module {source!r}",
            expected="an importable module or an existing .py file before the colon",
            where=WHERE,
            fix="Correct the path",
        )


def needs_extra(module: str, extra: str, where: str, command: str) -> None:
    """Refuses, with the command that mends it, what needs a package of an optional extra that is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"the package {module} is not installed", expected=f"the optional extra [{extra}]", where=where, fix=f"Run: {command}"
        )


def verdicts_of(replies: Sequence[Reply], counts: Counter) -> list[Verdict]:
    """Verdicts from sandbox replies. Reasons for none (known=False) are "timeout", "crashed", "raised", "nan" and "none": each is
    counted, and the first of each is logged in full."""
    verdicts = []
    for reply in replies:
        reason = reply.error or ("none" if reply.value is None else "" if math.isfinite(reply.value) else "nan")
        verdicts.append(Verdict(0.0, known=False) if reason else Verdict(reply.value))
        if reason:
            if not counts[reason]:
                log.warning("no verdict on a response: %s; further ones are only counted. %s", reason, reply.detail)
            counts[reason] += 1
    return verdicts
