"""Evaluation inside a run: its numbers belong to the state and the problems, not to how they are batched."""

import json

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jprm.errors import UserError
from jprm.rl.learner import Learner
from jprm.tasks.arithmetic import make_tokenizer
from jprm.train import dry_run, loop
from jprm.train.evaluation import Evaluator
from jprm.train.prompts import replicated
from jprm.train.state import TrainState
from tests.train.tiny import judged_by_a_coin, tiny_config


def test_an_evaluation_does_not_depend_on_its_batches(tmp_path):
    """11 problems at once, and 8 at a time with 5 of the second batch as filling: the same responses, the same numbers."""
    numbers, texts = [], []
    for batch in (11, 8, 3):
        config = tiny_config(tmp_path, rl=1, eval__problems=11, eval__batch=batch, eval__samples=2, eval__pass_k=4)
        run = judged_by_a_coin(config)
        with jax.set_mesh(run.mesh):
            zeros = (replicated(run, np.int32(0)) for _ in range(2))
            state = TrainState(*zeros, policy=Learner(run.initial_params(), ()))
            found, scored = Evaluator(run).measure(state, thorough=True)
        numbers.append(found)
        texts.append(scored.texts)
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 44 and len(set(texts[0])) > 40
    assert numbers[0] == numbers[1] == numbers[2]
    assert numbers[0]["eval/problems"] == 11 and 0 < numbers[0]["eval/accuracy"] < numbers[0]["eval/pass_at_4"]


def test_no_problems_to_evaluate_on(tmp_path):
    """A file for training alone, where config.eval.problems is left as it is."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in range(6)))
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    task = dict(task__name="file", task__options=ConfigDict(), task__train=(str(path),), task__separator=";")
    config = tiny_config(tmp_path / "run", rl=1, eval__problems=4, tokenizer__path=str(tmp_path / "tokenizer"), **task)
    for verb in (loop, dry_run):
        with pytest.raises(UserError) as error:
            verb.run(config)
        e = error.value
        assert e.found == "no problem to evaluate on" and e.expected == "at least one" and e.where == "config.task.eval"
        assert "config.task.split_by_hash" in e.fix and "config.eval.problems=0" in e.fix
    assert not (tmp_path / "run").exists()
