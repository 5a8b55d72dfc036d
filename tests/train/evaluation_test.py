"""Evaluation inside a run: its numbers belong to the state and the problems, not to how they are batched."""

import dataclasses
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
from jprm.train.samples import write_eval_samples
from jprm.train.setup import build
from jprm.train.state import TrainState
from tests.train.tiny import judged_by_a_coin, tiny_config


def first_state(run, *, with_prm=False):
    zeros = (replicated(run, np.int32(0)) for _ in range(2))
    policy = Learner(run.initial_params(), ())
    return (
        TrainState(*zeros, policy=policy, prm=policy, reference=policy.params) if with_prm else TrainState(*zeros, policy=policy)
    )


def test_an_evaluation_does_not_depend_on_its_batches(tmp_path):
    """11 problems at once, and 8 at a time with 5 of the second batch as filling: the same responses, the same numbers."""
    numbers, texts = [], []
    for batch in (11, 8, 3):
        config = tiny_config(tmp_path, rl=1, eval__problems=11, eval__batch=batch, eval__samples=2, eval__pass_k=4)
        run = judged_by_a_coin(config)
        with jax.set_mesh(run.mesh):
            found, scored = Evaluator(run).measure(first_state(run), thorough=True)
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


def test_a_stop_string_at_the_very_end_of_the_window(tmp_path):
    """Responses of one token: one that is a digit has ended by its string, not by its length. Only written rows are judged."""
    stops = tuple("0123456789")
    run = build(
        tiny_config(tmp_path, rl=1, eval__problems=24, eval__samples=2, sampling__max_new=1, sampling__stop_strings=stops)
    )
    asked, first_error = [], run.task.first_error

    def counted(problem, text):
        asked.append(text)
        return first_error(problem, text)

    run = dataclasses.replace(run, task=dataclasses.replace(run.task, first_error=counted))
    run.config.unlock().log.samples_rows = 31
    with jax.set_mesh(run.mesh):
        numbers, scored = Evaluator(run).measure(first_state(run), thorough=False)
    last = [run.tokenizer.decode([row[n - 1]]) for row, n in zip(scored.rollouts["tokens"], scored.rollouts["lengths"])]
    assert len(last) == 48 and 10 < sum(text in stops for text in last) < 40
    ended = [text in stops or text == "<eos>" for text in last]
    assert scored.rollouts["stopped"].tolist() == ended and numbers["eval/stopped"] == pytest.approx(np.mean(ended))
    asked.clear()
    write_eval_samples(run, 0, scored)
    rows = [json.loads(line) for line in (tmp_path / "samples" / "000000_eval.jsonl").read_text().splitlines()]
    kinds = ["string" if text in stops else "eos" if text == "<eos>" else "length" for text in last]
    assert [row["stop"] for row in rows] == kinds[:31] and asked == scored.texts[:31]


def test_a_sampling_mode_is_built_once(tmp_path):
    run, built = judged_by_a_coin(tiny_config(tmp_path, rl=1, eval__problems=4)), []
    factory = run.task.device_verifier
    task = dataclasses.replace(run.task, device_verifier=lambda tokenizer: built.append(1) or factory(tokenizer))
    evaluator = Evaluator(dataclasses.replace(run, task=task))
    greedy = dataclasses.replace(run.sampling, temperature=0.0)
    one, again, other = (evaluator._program(*mode) for mode in ((run.sampling, 2), (run.sampling, 2), (greedy, 2)))
    assert one is again is not other and len(built) == 2


def test_demonstrations_beyond_the_window_are_left_out(tmp_path, caplog):
    """Of sums below 10 the demonstration ("1+2=3;#3" and the end) is 9 tokens, of the others 11; the window has room for 9."""
    options = ConfigDict(dict(operations=1, low=1, high=8))
    run = build(tiny_config(tmp_path, rl=1, eval__problems=16, sampling__max_new=9, task__options=options))
    answers = [int(p.answer) for p in Evaluator(run).problems]
    with jax.set_mesh(run.mesh), caplog.at_level("INFO", "jprm"):
        Evaluator(run).first_error(first_state(run, with_prm=True), None)
    long = sum(a > 9 for a in answers)
    assert 0 < long < 16 and f"demonstrations of held-out problems: {long} of 16 left out for more than 13 tokens" in caplog.text


@pytest.mark.parametrize("key", ["prm_score", "first_error_score", "first_error_rows"])
def test_a_score_of_no_known_name(tmp_path, key):
    with pytest.raises(UserError) as error:
        loop.run(tiny_config(tmp_path / "run", rl=1, eval__problems=4, **{f"eval__{key}": "nothing"}))
    e = error.value
    assert e.where == f"config.eval.{key}" and e.found == f"{key} 'nothing'" and e.expected.startswith("one of ") and e.fix
    assert not (tmp_path / "run").exists()
