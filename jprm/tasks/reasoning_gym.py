"""Any task of the package reasoning-gym, by name: questions generated from a seed, answers scored by the package."""

import difflib
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jprm.errors import UserError
from jprm.tasks.sandbox import Sandbox
from jprm.tasks.task import Problem, Task, Verdict
from jprm.tasks.verifiers import needs_extra, verdicts_of

SEPARATOR = "\n"
RIGHT = 1.0 - 1e-6  # many scorers give wrong answers some credit, and some give any text .01; only full credit is right
SIZES = {"train_size": 10_000, "eval_size": 500}
_TAGGED = re.compile(r"<answer>([\s\S]*?)</answer>")
_STRIDE = 7919  # a prime, so that the walk past evaluation questions visits every index


class Entries(Sequence):
    """The problems of one split, generated on access: item i is a pure function of (seed, split, i).

    Small tasks give the same question twice, and so to both splits; where a training index gives an evaluation question, another
    index stands in for it.
    """

    def __init__(self, dataset: Any, held_out: frozenset[str] = frozenset()):
        self.dataset, self.held_out = dataset, held_out

    def __len__(self) -> int:
        return self.dataset.size

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        for attempt in range(100):
            entry = self.dataset[(index + attempt * _STRIDE) % len(self)]
            if entry["question"] not in self.held_out:
                columns = {"entry": {key: entry[key] for key in ("question", "answer", "metadata")}}
                return Problem(index=index, prompt=entry["question"], answer=str(entry["answer"]), columns=columns)
        raise UserError(
            "nothing but evaluation questions in 100 draws",
            expected="a task with more different questions than are held out",
            where="config.task.options",
            fix="Make the questions larger, or lower config.task.options.eval_size",
        )


def answer_of(response: str) -> str:
    """What a response gives as its answer: inside the last <answer> tags, else after the last "Answer:", else all of it."""
    if tagged := _TAGGED.findall(response):
        return tagged[-1].strip()
    return response.rpartition("Answer:")[2].strip()


def _demonstration(problem: Problem, draw: int) -> str | None:
    """The answer and nothing else; None in the few tasks that give no answer of their own (they only score)."""
    return None if problem.columns["entry"]["answer"] is None else f"Answer: {problem.answer}"


def scorer_call(name: str, options: Mapping[str, Any]) -> Callable[[tuple[str, dict[str, Any]]], float]:
    """(answer, entry) -> the package's score. Made inside a sandbox process: some scorers evaluate what a policy wrote."""
    dataset = _dataset(name, options, seed=0, size=1)

    def call(item: tuple[str, dict[str, Any]]) -> float:
        answer, entry = item
        return float(dataset.score_answer(answer, entry))

    return call


def _dataset(name: str, options: Mapping[str, Any], *, seed: int, size: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **options, seed=seed, size=size)
    except (TypeError, AssertionError, ValueError, KeyError, AttributeError) as error:
        raise UserError(
            f"options that {name} refuses ({error})",
            expected=f"the configuration of reasoning-gym's {name}",
            where="config.task.options",
            fix="Mend config.task.options",
        ) from error


def reasoning_gym_task(name: str, options: Mapping[str, Any], config: Any, *, seed: int = 0) -> Task:
    """The task `reasoning_gym:<name>`.

    Args:
      name: reasoning-gym's name, such as "chain_sum".
      options: its keyword arguments, and `train_size`, `eval_size`.
      config: the group `config.task`, for the time limit, the number of processes and the separator.

    Raises:
      UserError: the extra is absent, no task of that name (the nearest are listed), options that it refuses.
    """
    needs_extra("reasoning_gym", "tasks", "config.task.name", "pip install jprm[tasks]")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.0)
        raise UserError(
            f"no task {name!r} in reasoning-gym",
            expected=f"one of its {len(DATASETS)} names; the nearest are {', '.join(near)}",
            where="config.task.name",
            fix=f'Set config.task.name="reasoning_gym:{near[0]}"',
        )
    sizes = {key: int(options.get(key, default)) for key, default in SIZES.items()}
    for key, size in sizes.items():
        if size < 1:
            where = f"config.task.options.{key}"
            raise UserError(f"{key} {size}", expected="at least 1", where=where, fix=f"Set it to {SIZES[key]}")
    options = {key: value for key, value in options.items() if key not in SIZES}
    seeds = {split: random.Random(f"{seed}/{split}").randrange(2**31) for split in ("train", "eval")}
    held_out = Entries(_dataset(name, options, seed=seeds["eval"], size=sizes["eval_size"]))
    train = Entries(
        _dataset(name, options, seed=seeds["train"], size=sizes["train_size"]), frozenset(problem.prompt for problem in held_out)
    )
    train[0]  # a task too small to hold anything out is refused here, not in the middle of a run
    counts: Counter = Counter()
    box = Sandbox(
        "jprm.tasks.reasoning_gym:scorer_call",
        (name, options),
        timeout_s=config.get("verifier_timeout_s", 5.0),
        workers=config.get("verifier_workers", 1),
        where="config.task.name",
    )

    def verify(problems: Sequence[Problem], responses: Sequence[str], response_ids: Any = None) -> list[Verdict]:
        del response_ids
        items = [(answer_of(text), problem.columns["entry"]) for problem, text in zip(problems, responses, strict=True)]
        replies = box.call(items)
        # A scorer that raises does so on text that it cannot read as an answer: wrong, and counted.
        return [
            Verdict(0.0) if reply.error == "raised" else Verdict(float(verdict.score >= RIGHT), verdict.known)
            for reply, verdict in zip(replies, verdicts_of(replies, counts), strict=True)
        ]

    return Task(
        name=f"reasoning_gym:{name}",
        train=train,
        eval=held_out,
        separator=config.get("separator") or SEPARATOR,
        verify=verify,
        demonstration=_demonstration,
        counts=counts,
        close=box.close,
    )
