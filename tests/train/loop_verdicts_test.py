"""The loop and what judges its responses: verifiers on the host and on the device, prompts that teach or do not fit."""

import dataclasses
import json

import pytest

from jprm.tasks import arithmetic
from jprm.tasks.task import Verdict
from jprm.train import loop, setup
from jprm.train.metrics import read_metrics
from tests.train.tiny import judged_by_a_coin, refused, tiny_config


def judged(verify, **config):
    """A build function whose host verifier is ``verify(problems, texts, ids)``."""

    def build(c):
        run = setup.build(c)
        return dataclasses.replace(run, task=dataclasses.replace(run.task, verify=verify, device_verifier=None))

    return build


# ------------------------------------------------------------------------------------------------ verdicts


PLAIN = dict(rl__process_weight=0.0)  # no PRM: half the program


def coin(problems, texts, ids):
    return [Verdict(float(sum(i) % 2)) for i in ids]


def test_the_host_s_verdicts_are_the_device_s(tmp_path, monkeypatch):
    """The same rows get the same outcomes by either path, and the step then does the same."""
    monkeypatch.setattr(loop, "build", judged_by_a_coin)
    assert loop.run(tiny_config(tmp_path / "device", rl=3, **PLAIN)) == 0
    monkeypatch.setattr(loop, "build", judged(coin))
    assert loop.run(tiny_config(tmp_path / "host", rl=3, **PLAIN)) == 0
    a, b = (read_metrics(tmp_path / n / "metrics.jsonl") for n in ("device", "host"))
    assert all(0 < r["critic/score/mean"] < 1 for r in a)
    for x, y in zip(a, b, strict=True):
        assert {"timing_s/gen", "timing_s/verify", "timing_s/step"} <= y.keys()
        same = [k for k in x if not k.startswith(("time", "timing", "phase"))]
        assert {k: y[k] for k in same} == pytest.approx({k: x[k] for k in same}, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("fault", ["nan", "unknown"])
def test_a_verifier_that_cannot_say(tmp_path, monkeypatch, fault):
    """A NaN score and an unknown one are no verdicts: counted, left out, and the run goes on."""

    def verify(problems, texts, ids):
        verdicts = coin(problems, texts, ids)
        verdicts[0] = Verdict(float("nan")) if fault == "nan" else Verdict(1.0, known=False)
        return verdicts

    monkeypatch.setattr(loop, "build", judged(verify))
    assert loop.run(tiny_config(tmp_path / "run", rl=2, **PLAIN)) == 0
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert (
            row["critic/unknown"] == 1
            and row["critic/labelled"] == 15
            and row["actor/grad_norm"] > 0
            and row["skipped_in_a_row"] == 0
        )


def test_a_verifier_with_the_wrong_count_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "build", judged(lambda problems, texts, ids: coin(problems, texts, ids)[1:]))
    e = refused(tiny_config(tmp_path / "run", rl=1, **PLAIN))
    assert e.found == "15 verdicts for 16 responses" and e.where == "config.task.verifier"


HANGS = """
import time

def judge(completions, **kwargs):
    text = completions[0]
    if text.startswith("1"):
        raise ValueError(text)
    if text.startswith("2"):
        time.sleep(60)
    return [float(len(text) % 2)]
"""


@pytest.mark.slow
def test_a_user_s_verifier_that_raises_or_hangs(tmp_path):
    """In a process of its own, by path; each such response is unknown, the others are judged."""
    path = tmp_path / "mine.py"
    path.write_text(HANGS)
    config = tiny_config(
        tmp_path / "run", rl=2, task__verifier=f"{path}:judge", task__verifier_timeout_s=0.5, rl__group=8, **PLAIN
    )
    assert loop.run(config) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(r["critic/unknown"] for r in rows) > 0 and all(r["critic/unknown"] + r["critic/labelled"] == 32 for r in rows)


def test_stop_strings_cut_text_and_ids_together(tmp_path, monkeypatch):
    """What follows the string is neither judged nor learnt from."""
    texts = []

    def verify(problems, responses, ids):
        texts.extend(responses)
        return coin(problems, responses, ids)

    monkeypatch.setattr(loop, "build", judged(verify))
    plain, cut = tmp_path / "plain", tmp_path / "cut"
    assert loop.run(tiny_config(plain, rl=1, **PLAIN)) == 0
    whole, texts[:] = list(texts), []
    assert loop.run(tiny_config(cut, rl=1, sampling__stop_strings=("3", "+"), **PLAIN)) == 0
    first = [min((t.find(s) for s in "3+" if s in t), default=len(t)) for t in whole]
    assert texts == [t[:n] for t, n in zip(whole, first)] and texts != whole
    a, b = (read_metrics(w / "metrics.jsonl")[0]["response_length/mean"] for w in (plain, cut))
    assert b < a


def test_oversampling_keeps_the_prompts_that_teach(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "build", judged_by_a_coin)
    assert (
        loop.run(
            tiny_config(
                tmp_path / "run",
                rl=2,
                rl__oversample=2,
                rl__prompts=8,
                rl__group=2,
                rl__mask_uniform=True,
                rl__band_low=0.1,
                rl__band_high=0.9,
                **PLAIN,
            )
        )
        == 0
    )
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        passed = round(row["critic/kept_prompts"] * 16)
        kept = round(row["critic/labelled"]) // 2  # each of the 8 shards keeps one of its own two
        assert 4 < kept <= min(passed, 8) and passed < 16 and row["critic/contrast_groups"] == kept / 8


# ------------------------------------------------------------------------------------------------ data


def prompts(tmp_path, questions):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": "2"}) + "\n" for q in questions))
    return path


def test_prompts_too_long_are_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "_tokenizer", lambda config, task: arithmetic.make_tokenizer())
    path = prompts(tmp_path, ["1+1=", "1+1+1+1=", "2+2=", "3+3+3="])
    config = tiny_config(
        tmp_path / "run", rl=1, task__name="file", task__train=(str(path),), task__verifier="number", task__separator=";", **PLAIN
    )
    config.unlock().task.options = {}
    assert loop.run(config.lock()) == 0
    assert "2 of 4" in (tmp_path / "run" / "run.log").read_text()
    path.write_text("".join(json.dumps({"question": f"1+1+1+{i}=", "answer": "2"}) + "\n" for i in range(3)))
    other = tiny_config(
        tmp_path / "other",
        rl=1,
        task__name="file",
        task__train=(str(path),),
        task__verifier="number",
        task__separator=";",
        **PLAIN,
    )
    other.unlock().task.options = {}
    assert "3" in refused(other.lock()).found
