"""The loop from a config to its files: what it writes, how it ends, and what a user is told before anything is lost."""

import errno
import json
import logging

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

from jprm.train import loop, setup
from jprm.train.metrics import read_metrics
from tests.train.tiny import judged_by_a_coin, refused, tiny_config, write_labelled


def told(capfd, workdir):
    """The last line of a run, and its exit report."""
    report = workdir / "exit_report.json"
    return capfd.readouterr().out.strip().splitlines()[-1], json.loads(report.read_text()) if report.exists() else None


# ------------------------------------------------------------------------------------------------ a whole run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """SFT, offline PRM and PRIME with evaluations, sample files, exports and all."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(
        folder / "run",
        sft=3,
        prm=3,
        rl=4,
        prm__data=(str(write_labelled(folder / "rows.jsonl")),),
        sft__optimizer__lr=0.02,
        eval__problems=6,
        eval__batch=8,
        eval__samples=2,
        eval__pass_k=4,
        eval__every=2,
        log__samples_every=2,
        log__samples_rows=3,
        rl__mask_uniform=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build", judged_by_a_coin)
        assert loop.run(config) == 0
    return folder / "run"


def test_a_number_without_data_is_not_shown(tmp_path, monkeypatch, capfd):
    """While the policy waits there is no entropy; its row has null, its line nothing."""
    monkeypatch.setattr(loop, "build", judged_by_a_coin)
    assert loop.run(tiny_config(tmp_path / "run", rl=1, rl__prm_warmup=1)) == 0
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["actor/entropy"] is None
    line = next(x for x in capfd.readouterr().err.splitlines() if x.startswith("rl 1/1"))
    assert "prm auc" in line and "entropy" not in line


def test_metrics_name_every_iteration_of_every_phase(whole):
    rows = read_metrics(whole / "metrics.jsonl")
    assert [(r["step"], r["phase"]) for r in rows if r["phase"] != "eval"] == [
        (i + 1, p) for i, p in enumerate(["sft"] * 3 + ["prm"] * 3 + ["rl"] * 4)
    ]
    assert [r["step"] for r in rows if r["phase"] == "eval"] == [6, 8, 10]
    assert all(b["time_s"] >= a["time_s"] for a, b in zip(rows, rows[1:]))
    expected = {
        "sft": {"sft/loss", "sft/grad_norm"},
        "prm": {"prm/loss", "prm/grad_norm", "prm/auc"},
        "rl": {
            "critic/score/mean",
            "response_length/mean",
            "actor/loss",
            "actor/kl",
            "actor/entropy",
            "actor/clip_fraction",
            "actor/grad_norm",
            "actor/sampler_drift",
            "prm/loss",
            "prm/auc",
            "prm/pair_accuracy",
            "timing_s/iteration",
        },
        "eval": {"eval/accuracy", "eval/accuracy_stderr", "timing_s/eval"},
    }
    for row in rows:
        assert not expected[row["phase"]] - {"actor/kl"} - row.keys(), row["phase"]
        assert all(v is None or isinstance(v, (int, float)) for k, v in row.items() if k != "phase")
    thorough = [r for r in rows if "eval/greedy" in r]
    assert [r["step"] for r in thorough] == [6, 10] and all("eval/pass_at_4" in r and "eval/majority_at_4" in r for r in thorough)
    drift = [r["actor/sampler_drift"] for r in rows if r["phase"] == "rl" and r["actor/sampler_drift"] is not None]
    assert drift and max(drift) < 1e-4


def test_samples_are_what_the_report_reads(whole):
    names = sorted(p.name for p in (whole / "samples").iterdir())
    assert names == ["000006_eval.jsonl", "000007.jsonl", "000008_eval.jsonl", "000009.jsonl", "000010_eval.jsonl"]
    for name in names:
        rows = [json.loads(line) for line in (whole / "samples" / name).read_text().splitlines()]
        assert [r["row"] for r in rows] == [0, 1, 2] and all(r["step"] == int(name[:6]) for r in rows)
        for r in rows:
            n = len(r["tokens"])
            assert r["phase"] == ("eval" if "eval" in name else "rl") and r["stop"] in ("eos", "length") and n > 0
            assert "".join(r["tokens"]).removesuffix("<eos>") == r["response"] and (r["stop"] == "eos") == (
                r["tokens"][-1] == "<eos>"
            )
            assert r["known"] is True and r["outcome"] in (0.0, 1.0) and r["answer"] == str(eval(r["prompt"][:-1]))
            assert len(r["step_of_token"]) == n and max(r["step_of_token"]) < 3 and r["first_error"] >= -1
            if r["phase"] == "rl":
                assert r["prompt_id"] == rows[0]["prompt_id"]  # a group's rows are neighbours
                assert len(r["token_rewards"]) == len(r["advantages"]) == len(r["returns"]) == n
                assert len(r["step_scores"]) == max(r["step_of_token"]) + 1
                assert sum(r["step_scores"]) == pytest.approx(sum(r["token_rewards"]), abs=1e-4)


def test_a_run_leaves_a_summary_and_a_report(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert {
        "accuracy_before",
        "accuracy_after",
        "greedy_before",
        "greedy_after",
        "pass_at_4_before",
        "pass_at_4_after",
        "seconds",
    } <= summary.keys()
    assert summary["iterations"] == 10 and "<html" in (whole / "report.html").read_text()
    assert json.loads((whole / "exit_report.json").read_text())["cause"] == "done"
    assert not list((whole / "checkpoints").glob("*.tmp")) and len(list((whole / "checkpoints").glob("0*"))) == 2
    assert json.loads((whole / "config.json").read_text())["rl"]["iterations"] == 4


def test_another_config_is_not_this_run(whole):
    before = (whole / "config.json").read_text(), (whole / "metrics.jsonl").read_text()
    e = refused(tiny_config(whole, sft=3, rl=4, rl__group=8))
    assert "rl.group: 4 -> 8" in e.found and e.where == str(whole)
    assert before == ((whole / "config.json").read_text(), (whole / "metrics.jsonl").read_text())


# ------------------------------------------------------------------------------------------------ endings


def test_a_run_of_non_finite_updates_ends(tmp_path, capfd, monkeypatch, caplog):
    """After max_skipped in a row; parameters are still those of the last good iteration, and the rows read are named."""
    initial = setup.Run.initial_params

    def spoilt(run):
        params = initial(run)
        return {**params, "final_norm": params["final_norm"].at[0].set(jnp.nan)}

    monkeypatch.setattr(setup.Run, "initial_params", spoilt)
    with caplog.at_level(logging.WARNING):
        assert loop.run(tiny_config(tmp_path / "run", sft=9, log__max_skipped=3)) == 76
    line, report = told(capfd, tmp_path / "run")
    assert line == "JPRM_EXIT cause=non_finite step=3 resumable=no" or "cause=non_finite" in line
    assert report["code"] == 76 and "3 iterations in a row" in report["message"]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["skipped_in_a_row"] for r in rows] == [1, 2, 3] and all(r["sft/loss"] is None for r in rows)
    assert sum("thrown away" in r.message and "Its rows: [" in r.message for r in caplog.records) == 3


def test_a_full_disk_does_not_lose_the_run(tmp_path, capfd, monkeypatch):
    """One save that finds no space is said and survived; the second in a row ends the run with its own code."""
    save, calls = ocp.save_async, []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) in (2, 4, 5):
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(ocp, "save_async", full)
    assert loop.run(tiny_config(tmp_path / "run", sft=9, checkpoint__every=1)) == 74
    line, report = told(capfd, tmp_path / "run")
    assert line.startswith("JPRM_EXIT cause=disk_full") and line.endswith("resumable=yes")
    assert report["last_checkpoint"].endswith("000003") and report["resumable"]
    monkeypatch.setattr(ocp, "save_async", save)
    assert loop.run(tiny_config(tmp_path / "run", sft=9, checkpoint__every=1)) == 0
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 10))


def test_a_crash_is_told_and_logged(tmp_path, capfd, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(loop, "write_samples", broken)
    assert loop.run(tiny_config(tmp_path / "run", sft=3)) == 1
    line, report = told(capfd, tmp_path / "run")
    assert (
        "cause=crash" in line
        and report["message"] == "a bug"
        and "ZeroDivisionError" in (tmp_path / "run" / "run.log").read_text()
    )


# ------------------------------------------------------------------------------------------------ refused in time


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    e = refused(tiny_config(tmp_path, sft=1))
    assert e.where == str(tmp_path) and [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "changes, where, found",
    [
        (dict(sft=0), "config.{sft.steps, prm.steps, rl.iterations}", "0"),
        (dict(sft=1, mesh__data=3, mesh__fsdp=1), "config.mesh", "data=3"),
        (dict(sft=1, mesh__tensor=8, mesh__fsdp=1), "config.model.num_kv_heads", "2"),
        (dict(sft=1, sft__batch_size=12), "config.sft", "12 rows"),
        (dict(sft=1, sft__micro_batch=3), "config.sft.micro_batch", "3"),
        (dict(rl=1, rl__minibatches=3), "config.rl.minibatches", "3 minibatches"),
        (dict(rl=1, rl__group=0), "config.rl.group", "0"),
        (dict(rl=1, rl__prm_order="later"), "config.rl.prm_order", "later"),
        (dict(rl=1, rl__estimator="ppo"), "config.rl.estimator", "ppo"),
        (dict(sft=1, sampling__max_prompt=3000), "config.sampling", "3000"),
        (dict(rl=1, sampling__temperature=-1.0), "config.sampling.temperature", "-1.0"),
        (dict(sft=1, model__family="gpt"), "config.model.family", "gpt"),
        (dict(sft=1, model__dtype="float16"), "config.model.dtype", "float16"),
        (dict(sft=1, model__remat="some"), "config.model.remat", "some"),
        (dict(sft=5, sft__optimizer__warmup=5), "config.sft.optimizer.warmup", "5"),
        (dict(sft=1, sft__optimizer__schedule="step"), "config.sft.optimizer.schedule", "step"),
        (dict(prm=1), "config.prm.data", "no data"),
        (dict(sft=1, prm=1, prm__data=("nowhere.jsonl",), rl=1), "nowhere.jsonl", "no "),
        (dict(rl=1, task__verifier="nubmer"), "config.task.verifier", "nubmer"),
        (dict(rl=1, task__verifier="no_such_module:f"), "config.task.verifier", "no_such_module"),
        (dict(rl=1, task__name="arithmetics"), "config.task.name", "arithmetics"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_what_does_not_fit_is_a_sentence(tmp_path, changes, where, found):
    """… that names the key, before the workdir exists."""
    e = refused(tiny_config(tmp_path / "run", **changes))
    assert e.where == where and found in e.found
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "rows, found",
    [([], "empty"), ([{"prompt": "1+1=", "response": "#2", "label": 1}] * 9, "all labelled 1")],
    ids=["empty", "one class"],
)
def test_labelled_data_that_cannot_teach(tmp_path, rows, found):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    e = refused(tiny_config(tmp_path / "run", prm=1, prm__data=(str(path),)))
    assert found in e.found or found in str(e)
