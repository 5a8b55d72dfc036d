"""Tasks of reasoning-gym: pure functions of seed and index, disjoint splits, scores that only full credit passes."""

import importlib.util

import pytest
from ml_collections import ConfigDict

from jprm.errors import UserError
from jprm.tasks.reasoning_gym import answer_of
from jprm.tasks.task import Verdict, make_task
from tests.conftest import needs

needs("reasoning_gym")


def task_of(name, seed=0, **options):
    config = ConfigDict({"name": f"reasoning_gym:{name}", "options": options, "verifier_timeout_s": 20.0, "verifier_workers": 1})
    return make_task(config, seed=seed)


def test_chain_sum():
    options = dict(min_terms=2, max_terms=3, min_digits=1, max_digits=2, eval_size=50)
    task, same, other = (task_of("chain_sum", seed, **options) for seed in (0, 0, 1))
    assert task.train[77] == same.train[77] != other.train[77] and len(task.eval) == 50
    problem = task.train[0]
    right = problem.answer
    texts = [f"so\nAnswer: {right}", f"<answer>{right}</answer>", right, f"{right}1", "what", ""]
    assert [v.score for v in task.verify([problem] * 6, texts)] == [1, 1, 1, 0, 0, 0]
    assert task.demonstration(problem, 3) == f"Answer: {right}"
    task.close()


def test_small_tasks_have_disjoint_splits_too():
    task = task_of("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, eval_size=100, train_size=300)
    held_out = {p.prompt for p in task.eval}
    assert not held_out & {task.train[i].prompt for i in range(300)}


def test_partial_credit_is_wrong_and_a_scorer_that_raises_is_counted():
    task = task_of("prime_factorization", eval_size=5)
    problem = task.train[0]
    texts = [problem.answer, "no idea", "1 × 1"]
    assert task.verify([problem] * 3, texts) == [Verdict(1.0), Verdict(0.0), Verdict(0.0)]
    assert task.counts == {"raised": 1}
    task.close()


def test_answer_of():
    texts = ["Answer: 1\nAnswer: 2 ", "<answer>1</answer><answer> 2\n</answer> 3", " 2", "x Answer:", ""]
    assert [answer_of(text) for text in texts] == ["2", "2", "2", "", ""]


BAD = {
    "unknown name": ("chain_sums", {}, "config.task.name", "no task 'chain_sums'", "reasoning_gym:chain_sum"),
    "unknown option": ("chain_sum", {"terms": 3}, "config.task.options", "options that chain_sum refuses", "Mend"),
    "bad value": ("chain_sum", {"min_terms": 9, "max_terms": 2}, "config.task.options", "options that chain_sum refuses", "Mend"),
    "no size": ("chain_sum", {"eval_size": 0}, "config.task.options.eval_size", "eval_size 0", "Set it to 500"),
    "too small": (
        "chain_sum",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "eval_size": 3000, "train_size": 20},
        "config.task.options",
        "nothing but evaluation questions",
        "lower config.task.options.eval_size",
    ),
}


@pytest.mark.parametrize("name, options, where, found, fix", BAD.values(), ids=BAD)
def test_bad_settings(name, options, where, found, fix):
    with pytest.raises(UserError) as error:
        task_of(name, **options)
    assert error.value.where == where and error.value.found.startswith(found) and fix in error.value.fix
    assert name != "chain_sums" or "chain_sum" in error.value.expected


def test_absent_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        task_of("chain_sum")
    assert error.value.fix == "Run: pip install jprm[tasks]" and error.value.where == "config.task.name"
