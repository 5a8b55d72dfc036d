"""What a run trains on: problems, demonstrations and verdicts, behind one small type."""

import dataclasses
import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jprm.errors import UserError

Prompt = str | list[dict[str, Any]]  # plain text, or chat messages [{"role": ..., "content": ...}]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question with its ground truth.

    Attributes:
      index: position within its split; the split, the seed and this integer determine the problem.
      prompt: text, or chat messages.
      answer: the ground truth as text.
      columns: the row's other columns as the data source has them; user verifiers receive them, and those that hold integers
        reach device verifiers as arrays.
    """

    index: int
    prompt: Prompt
    answer: str
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A verifier's word on one response: `score` (1.0 is right) where `known`; a time-out, a crash and NaN are not known."""

    score: float
    known: bool = True


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything the loop asks about text. Fields that are functions may be absent (None) where a task has no such thing.

    Attributes:
      name: the name in `config.task.name`.
      train, eval: problems, indexable by integer and possibly generated on access. No prompt is in both.
      separator: text that ends a reasoning step.
      verify: (problems, responses, response_ids=None) -> one Verdict per response, in order.
      demonstration: (problem, draw) -> a response to imitate, or None where the problem has none. Another `draw` may give another
        demonstration of the same problem; the same draw always gives the same.
      first_error: (problem, response) -> 0-based index of the first wrong step, -1 where all are right; None where the truth of
        steps is not known.
      device_verifier: (tokenizer) -> a pure JAX function (tokens i32[R,T], prompt_lengths i32[R], lengths i32[R],
        columns {name: [R]}) -> (outcome f32[R], known bool[R]) that agrees with `verify`.
      make_tokenizer: () -> the tokenizer a task brings for a model from scratch.
      longest: of all prompts the longest, and of all its demonstrations the longest, in characters; None where nobody can say
        before they are drawn.
      counts: verdicts that could not be given, by reason, since the task was made; only ever added to.
      close: ends the processes the task holds. Called at exit in any case.
    """

    name: str
    train: Sequence[Problem]
    eval: Sequence[Problem]
    separator: str
    verify: Callable[..., list[Verdict]]
    demonstration: Callable[[Problem, int], str | None] = lambda problem, draw: None
    first_error: Callable[[Problem, str], int | None] = lambda problem, response: None
    device_verifier: Callable[[Any], Callable] | None = None
    make_tokenizer: Callable[[], Any] | None = None
    longest: tuple[str, str] | None = None
    counts: Counter = dataclasses.field(default_factory=Counter)
    close: Callable[[], None] = lambda: None


def make_task(config: Any, *, seed: int = 0) -> Task:
    """The task that `config` (the group `config.task`) names.

    Args:
      config: a ConfigDict (or any mapping with attribute access). `name` is "arithmetic", "file" or "reasoning_gym:<task>".
      seed: the run's seed; generated problems and demonstrations depend on it, the split they belong to does not.

    Raises:
      UserError: an unknown name, and whatever the task itself finds wrong.
    """
    kind, _, rest = config.name.partition(":")
    if kind == "arithmetic" and not rest:
        from jprm.tasks.arithmetic import arithmetic_task

        return _judged_by(config, arithmetic_task(task_options(config), seed=seed, separator=config.get("separator")))
    if kind == "file" and not rest:
        from jprm.tasks.files import file_task

        return file_task(config)
    if kind == "reasoning_gym":
        from jprm.tasks.reasoning_gym import reasoning_gym_task

        return _judged_by(config, reasoning_gym_task(rest, task_options(config), config, seed=seed))
    near = difflib.get_close_matches(config.name, ["arithmetic", "file", "reasoning_gym:chain_sum"], n=1, cutoff=0.0)
    raise UserError(
        f"task name {config.name!r}",
        expected='"arithmetic", "file" or "reasoning_gym:<task>"',
        where="config.task.name",
        fix=f"Set config.task.name={near[0]!r}",
    )


def _judged_by(config: Any, task: Task) -> Task:
    """The same task with the verifier that `config.verifier` names; "auto" leaves it its own."""
    name = config.get("verifier") or "auto"
    if name == "auto":
        return task
    from jprm.tasks.verifiers import make_verifier

    timeout_s, workers = config.get("verifier_timeout_s", 5.0), config.get("verifier_workers", 1)
    try:
        verify, close = make_verifier(name, timeout_s=timeout_s, workers=workers, counts=task.counts)
    except BaseException:
        task.close()
        raise

    def close_both() -> None:
        close()
        task.close()

    return dataclasses.replace(task, verify=verify, device_verifier=None, close=close_both)


def task_options(config: Any) -> dict[str, Any]:
    """`config.task.options` as a plain dict (a ConfigDict is unwrapped, absent is empty)."""
    options = config.get("options") or {}
    return options.to_dict() if hasattr(options, "to_dict") else dict(options)


def check_options(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuses an option that the task does not have, naming the nearest that it has."""
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise UserError(
                f"option {key!r}",
                expected="one of " + ", ".join(known) if known else "no options for this task",
                where=f"config.task.options.{key}",
                fix=f"Use {near[0]!r}" if near else "Set config.task.options={}",
            )
