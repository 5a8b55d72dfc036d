"""What a run is given by mistake or by accident, beyond loop_test.py: it is refused in time, or it costs no more than it must."""

import dataclasses
import json
import math
import pathlib

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jprm.errors import UserError
from jprm.tasks.arithmetic import make_tokenizer
from jprm.tasks.task import Verdict
from jprm.train import checkpoint, loop, phases
from jprm.train.metrics import read_metrics
from tests.train.tiny import judged_by_a_coin, tiny_config

PLAIN = dict(rl__process_weight=0.0)  # no PRM: half the program


def parts(error):
    return error.value.found, error.value.expected, error.value.where, error.value.fix


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder):
    """Every file below a folder: its bytes, and when it was written."""
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def newest(workdir):
    """Every array of the newest checkpoint, by name."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def template(meta):
        return {k: jax.ShapeDtypeStruct(tuple(d["shape"]), d["dtype"], sharding=here) for k, d in meta["leaves"].items()}

    return jax.device_get(checkpoint.restore(workdir / "checkpoints", template)[0])


def coin_on_the_host(config, seen=None):
    """The coin of `judged_by_a_coin`, thrown by a verifier that only the host can call; ``seen`` gets the texts it is shown."""
    run = judged_by_a_coin(config)

    def verify(problems, responses, response_ids):
        (seen if seen is not None else []).extend(responses)
        return [Verdict(float(sum(ids) % 2)) for ids in response_ids]

    return dataclasses.replace(run, task=dataclasses.replace(run.task, device_verifier=None, verify=verify))


# ------------------------------------------------------------------------------------------------ the workdir


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = tiny_config(
        tmp_path_factory.mktemp("finished") / "run", sft=2, sft__optimizer__lr=0.02, eval__problems=4, eval__samples=2
    )
    assert loop.run(config) == 0
    return pathlib.Path(config.workdir), config


def test_a_finished_run_has_nothing_left_to_do(finished, monkeypatch, capsys):
    workdir, config = finished
    monkeypatch.setattr(phases.SupervisedProgram, "iterate", lambda *a: pytest.fail("an iteration"))
    before = contents(workdir)
    assert loop.run(config) == 0
    after = contents(workdir)
    assert after.keys() == before.keys() and len(after) > 8
    written = {path for path in after if after[path][0] != before[path][0]}
    assert written <= {"exit_report.json", "run.log", "report.html"}
    assert "JPRM_EXIT cause=done step=2" in capsys.readouterr().out


def test_another_config_touches_no_file(finished):
    workdir, config = finished
    before = contents(workdir)
    other = config.copy_and_resolve_references().unlock()
    other.sft.batch_size, other.sft.optimizer.lr = 16, 0.5
    with pytest.raises(UserError) as error:
        loop.run(other.lock())
    found, expected, where, fix = parts(error)
    assert "sft.batch_size: 8 -> 16" in found and "sft.optimizer.lr: 0.02 -> 0.5" in found and "started with" in expected
    assert where == str(workdir) and fix == "Set config.sft.batch_size=8 and the others back, or name a new config.workdir"
    assert contents(workdir) == before


NO_RUN, NO_CONFIG = "something that is no jprm run", "a config.json that jprm did not write"


@pytest.mark.parametrize("text, expected_found", [("", NO_RUN), ("a letter", NO_CONFIG), ('{"model_type": "llama"}', NO_CONFIG)])
def test_a_workdir_that_is_none(tmp_path, text, expected_found):
    theirs = tmp_path / "theirs"
    if text:
        theirs.mkdir()
    (theirs / "config.json" if text else theirs).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(UserError) as error:
        loop.run(tiny_config(theirs, sft=1))
    found, expected, where, fix = parts(error)
    assert found == expected_found and "config.workdir" in fix
    assert where.startswith(str(theirs)) and expected and contents(tmp_path) == before


# ------------------------------------------------------------------------------------------------ prompts from a file


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(path)
    return str(path)


SHORT = [f"{a}+{b}=" for a in range(3) for b in range(3)]


def from_file(folder, tokenizer_path, prompts, **changes):
    """Iterations of RL on prompts from a file."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": str(i)}) + "\n" for i, p in enumerate(prompts)))
    task = dict(task__name="file", task__options=ConfigDict(), task__train=(str(path),), task__separator=";")
    return tiny_config(folder / "run", **PLAIN | task | dict(rl=1, tokenizer__path=tokenizer_path) | changes)


def test_prompts_that_are_all_too_long(tmp_path, tokenizer_path):
    """The key and the value that would let all of them in, before the workdir exists: with that value the run goes on there."""
    config = from_file(tmp_path, tokenizer_path, ["10+20=", "100+200="])
    with pytest.raises(UserError) as error:
        loop.run(config)
    found, expected, where, fix = parts(error)
    assert found == "2 of 2 prompts too long, the first (row 0) with 6 tokens" and expected == "at most 4 tokens"
    assert where == "config.sampling.max_prompt" and fix.startswith("Set config.sampling.max_prompt=8 ")
    assert not (tmp_path / "run").exists()
    config.sampling.max_prompt = 8
    assert loop.run(config) == 0


@pytest.mark.parametrize("text, found", [("", "an empty file"), ("\n\n", "a file without rows")], ids=["empty", "blank"])
def test_a_file_without_rows(tmp_path, tokenizer_path, text, found):
    config = from_file(tmp_path, tokenizer_path, SHORT)
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(UserError) as error:
        loop.run(config)
    assert error.value.found == found and all(parts(error))
    assert error.value.where == str(tmp_path / "prompts.jsonl")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------ verdicts


def test_a_verdict_from_the_host_trains_as_one_from_the_device_does(tmp_path, monkeypatch):
    """PRIME, to the bit of every array, although the device's path is one program and the host's is two."""
    scores, arrays = [], []
    for name, build in (("device", judged_by_a_coin), ("host", coin_on_the_host)):
        monkeypatch.setattr(loop, "build", build)
        assert loop.run(tiny_config(tmp_path / name, rl=2)) == 0
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        assert ("timing_s/verify" in rows[0]) == (name == "host")
        scores.append([row["critic/score/mean"] for row in rows])
        arrays.append(newest(tmp_path / name))
    assert scores[0] == scores[1] and 0 < scores[0][0] < 1 and len(arrays[0]) > 20
    for key in arrays[0]:
        np.testing.assert_array_equal(arrays[0][key], arrays[1][key], err_msg=key)


FUNCTIONS = """
import time

def raises(solution_str, ground_truth, **_):
    if len(solution_str) % 2:
        raise RuntimeError("no idea")
    return 1.0

def hangs(solution_str, ground_truth, **_):
    if ground_truth == "0":
        time.sleep(60)
    return 1.0

def nothing(prompts, completions, **_):
    return [None]

def two(prompts, completions, **_):
    return [1.0, 0.0]
"""


def with_function(folder, tokenizer_path, name, **changes):
    (folder / "judge.py").write_text(FUNCTIONS)
    return from_file(folder, tokenizer_path, SHORT, task__verifier=f"{folder / 'judge.py'}:{name}", **changes)


def test_a_verifier_that_raises_costs_exactly_its_rows(tmp_path, tokenizer_path):
    assert loop.run(with_function(tmp_path, tokenizer_path, "raises", log__samples_every=1)) == 0
    [row] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    sampled = lines(tmp_path / "run" / "samples" / "000001.jsonl")
    odd = [len(s["response"]) % 2 == 1 for s in sampled]
    assert len(sampled) == 16 and 0 < sum(odd) < 16
    assert [s["known"] for s in sampled] == [not o for o in odd]
    assert [s["outcome"] for s in sampled] == [None if o else 1.0 for o in odd]
    assert row["critic/unknown"] == sum(odd) and row["critic/score/mean"] == 1.0
    assert "no verdict on a response: raised" in (tmp_path / "run" / "run.log").read_text()


def test_a_verifier_that_hangs_costs_exactly_its_rows(tmp_path, tokenizer_path):
    """One problem of nine, in a round that asks each of eight once: at most one half second an iteration."""
    more = dict(task__verifier_timeout_s=0.5, rl__prompts=8, rl__group=1, rl=2, log__samples_every=1)
    assert loop.run(with_function(tmp_path, tokenizer_path, "hangs", **more)) == 0
    sampled = [row for n in (1, 2) for row in lines(tmp_path / "run" / "samples" / f"{n:06d}.jsonl")]
    assert [s["outcome"] for s in sampled] == [None if s["prompt"] == SHORT[0] else 1.0 for s in sampled]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["critic/unknown"] for row in rows) == sum(s["prompt"] == SHORT[0] for s in sampled) > 0


def test_no_verdict_at_all_teaches_nothing(tmp_path, tokenizer_path):
    config = with_function(tmp_path, tokenizer_path, "nothing", rl=2, checkpoint__every=1)
    assert loop.run(config) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["critic/unknown"] == 16 and row["actor/grad_norm"] == 0.0 and row["skipped_in_a_row"] == 0 for row in rows)
    assert all(np.isfinite(x).all() for x in newest(tmp_path / "run").values())


def test_two_values_for_one_response(tmp_path, tokenizer_path):
    with pytest.raises(UserError) as error:
        loop.run(with_function(tmp_path, tokenizer_path, "two"))
    found, expected, where, fix = parts(error)
    assert (found, where, fix) == ("2 values for 1 completion", "config.task.verifier", "Return [score]") and expected
    said = json.loads((tmp_path / "run" / "exit_report.json").read_text())
    assert (said["cause"], said["code"], said["resumable"]) == ("user_error", 2, False)


# ------------------------------------------------------------------------------------------------ numbers that are none


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_what_is_not_finite_is_never_learnt(tmp_path, monkeypatch, kind):
    """SFT whose first update throws the parameters out of all bounds; RL against a reference that is NaN.

    Every checkpoint from then on holds the last good parameters and moments, and the run says so and stops.
    """
    monkeypatch.setattr(loop, "build", judged_by_a_coin)
    always = dict(checkpoint__every=1, checkpoint__keep=9, log__max_skipped=3)
    good = int(kind == "sft")
    if kind == "sft":
        config = tiny_config(tmp_path / "run", sft=9, **always | dict(sft__optimizer__lr=1e37))
    else:
        config, enter = tiny_config(tmp_path / "run", rl=9, **always), loop.enter

        def poisoned(*args):
            state = enter(*args)
            return state.replace(reference=jax.tree.map(lambda x: x * math.nan, state.reference))

        monkeypatch.setattr(loop, "enter", poisoned)
    assert loop.run(config) == 76
    said = json.loads((tmp_path / "run" / "exit_report.json").read_text())
    assert (said["cause"], said["code"], said["step"]) == ("non_finite", 76, good + 3)
    assert said["resumable"] and said["last_checkpoint"].endswith("00000" + str(good + 2))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["skipped_in_a_row"] for row in rows] == [0] * good + [1, 2, 3]
    learnt = {k: x for k, x in newest(tmp_path / "run").items() if k.startswith(("policy", "prm"))}
    assert len(learnt) > 10 and all(np.isfinite(x).all() for x in learnt.values())
    if kind == "sft":
        assert max(np.abs(x).max() for x in learnt.values()) > 1e30


# ------------------------------------------------------------------------------------------------ ways to sample


def watched(monkeypatch):
    """The iterations of RL that will be run."""
    seen, iterate = [], phases.RLProgram.iterate

    def and_keep(self, state, step):
        seen.append(iterate(self, state, step))
        return seen[-1]

    monkeypatch.setattr(phases.RLProgram, "iterate", and_keep)
    return seen


def test_oversampling_keeps_the_shapes_that_were_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "build", judged_by_a_coin)
    seen = watched(monkeypatch)
    sizes = dict(rl__prompts=8, rl__group=4, rl__oversample=2, rl__band_low=0.25, rl__band_high=0.75)
    assert loop.run(tiny_config(tmp_path / "run", rl=2, log__samples_every=1, **sizes)) == 0
    for done in seen:
        assert done.prompts.tokens.shape == (16, 4) and len(set(done.batch_ids)) == 16
        assert done.trace.rollouts.tokens.shape == done.trace.advantages.shape == (32, 10)
    assert len(seen) == 2
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(0 < row["critic/kept_prompts"] < 1 and row["actor/grad_norm"] > 0 and row["prm/grad_norm"] > 0 for row in rows)


def test_a_stop_string_ends_what_is_learnt_from(tmp_path, monkeypatch):
    """The tokens of a response end with the one that completes the string; its text ends before it."""
    shown = []
    monkeypatch.setattr(loop, "build", lambda config: coin_on_the_host(config, shown))
    traces = watched(monkeypatch)
    stops = ("=", "+", "12")
    same = dict(rl=1, rl__prompts=8, log__samples_every=1, log__samples_rows=32, eval__problems=4, eval__samples=2, **PLAIN)
    assert loop.run(tiny_config(tmp_path / "whole", **same)) == 0
    shown.clear()
    assert loop.run(tiny_config(tmp_path / "cut", sampling__stop_strings=stops, **same)) == 0
    whole, cut = (lines(tmp_path / name / "samples" / "000001.jsonl") for name in ("whole", "cut"))
    places = [min((w["response"].find(s) for s in stops if s in w["response"]), default=None) for w in whole]
    assert 2 <= sum(p is not None for p in places) < len(whole)
    assert max(sum(s in w["response"] for s in stops) for w in whole) > 1  # the first of several counts
    at_once = range(0, len(shown) - len(whole) + 1)
    assert [c["response"] for c in cut] in [shown[i : i + len(whole)] for i in at_once]  # the verifier judges what is left
    for w, c, place in zip(whole, cut, places, strict=True):
        assert c["prompt"] == w["prompt"] and c["response"] == w["response"][:place]
        n = len(c["tokens"])
        assert n == len(c["step_of_token"]) == len(c["advantages"]) and c["tokens"] == w["tokens"][:n]
        if place is None:
            assert n == len(w["tokens"]) and c["stop"] == w["stop"]
        else:
            text = "".join(c["tokens"])
            assert any(text == c["response"] + s for s in stops) and c["stop"] == "string"
    trace = traces[-1].trace
    learnt = np.arange(10) < np.array([len(c["tokens"]) for c in cut])[:, None]
    np.testing.assert_array_equal(trace.rollouts.action, learnt)
    assert not np.asarray(trace.advantages)[~learnt].any() and np.asarray(trace.advantages)[learnt].any()
    held_out, before = (
        lines(tmp_path / "cut" / "samples" / "000000_eval.jsonl"),
        read_metrics(tmp_path / "cut" / "metrics.jsonl")[0],
    )
    assert len(held_out) == 8 and {c["stop"] for c in held_out} >= {"string", "length"}
    assert before["eval/stopped"] == np.mean([c["stop"] != "length" for c in held_out])
    a, b = (read_metrics(tmp_path / name / "metrics.jsonl")[1] for name in ("whole", "cut"))
    assert b["response_length/mean"] == pytest.approx(np.mean([len(c["tokens"]) for c in cut])) and a != b
