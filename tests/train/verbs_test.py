"""The verbs on one tiny run: what they write agrees with the run, with the task, and with each other."""

import json

import jax
import numpy as np
import pytest

from jprm import cli
from jprm.errors import UserError
from jprm.train import dry_run, evaluate, export, loop, sample, score
from jprm.train.config import default_config
from jprm.train.flags import load_saved
from jprm.train.metrics import read_metrics
from jprm.train.restore import restore_roles
from jprm.train.setup import build
from tests.conftest import needs

SFT, END = 200, 201  # iterations of the warm start, and with the one of RL


def tiny(workdir):
    c = default_config()
    c.workdir = str(workdir)
    c.model.hidden_size, c.model.intermediate_size, c.model.num_layers = 16, 32, 1
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 2, 1, 8
    with c.task.options.unlocked():
        c.task.options.operations, c.task.options.high = 1, 9
    c.sampling.max_prompt, c.sampling.max_new = 8, 20
    c.sft.steps, c.sft.batch_size = SFT, 32  # enough to be right now and then
    c.sft.optimizer.warmup, c.sft.optimizer.lr = 0, 2e-2
    c.rl.iterations, c.rl.prompts, c.rl.group = 1, 4, 2
    c.rl.mask_uniform = False
    c.prm.beta, c.prm.balance = 0.5, "none"
    c.prm.optimizer.lr = 1e-2
    c.eval.problems, c.eval.samples, c.eval.batch, c.eval.pass_k = 64, 4, 16, 4
    c.eval.first_error_rows = "policy"  # with one operation a demonstration has nothing to merge, and no error
    c.checkpoint.every, c.checkpoint.keep = SFT, 3
    c.log.tensorboard = False
    return c.lock()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("verbs") / "run"
    assert loop.run(tiny(workdir)) == 0
    return workdir


@pytest.fixture(scope="module")
def solutions(tmp_path_factory):
    """Rows 0 and 1: one solution as text and as steps; then one too long, one without a response, one of a single step."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [
        {"prompt": "3+1-2=", "response": "3+1=4;#2"},
        {"prompt": "3+1-2=", "steps": ["3+1=4", "#2"]},
        {"prompt": "3+1-2=", "response": "3+1=4;" * 10},
        {"prompt": "3+1-2=", "response": ""},
        {"prompt": "3+1-2=", "steps": ["3+1=4;#2"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def parts(error):
    return error.value.found, error.value.expected, error.value.where, error.value.fix


# ------------------------------------------------------------------------------------------------ dry run


def test_a_dry_run_reports_everything_and_touches_nothing(tmp_path, capsys):
    before = {id(x) for x in jax.live_arrays()}
    assert dry_run.run(tiny(tmp_path / "new")) == 0
    assert {id(x) for x in jax.live_arrays()} <= before and not (tmp_path / "new").exists()
    text = capsys.readouterr().out
    for part in (
        "layers/gate       1x16x32",
        "phase sft: iterations 1 to 200",
        "phase rl: iterations 201 to 201",
        "prm optimizer",
        "reference parameters",
        "Not counted: activations",
        "sampling.max_new = 20",
        "one iteration: 896 tokens",
    ):
        assert part in text, text


def test_a_dry_run_counts_bytes_and_flops_by_hand(tmp_path):
    run = build(tiny(tmp_path / "new"))
    phase = dry_run.make_phases(run.config, run.cfg)[0]
    state = dry_run.abstract_state(phase, run.cfg, run.mesh)
    D, F, V = 16, 32, run.cfg.vocab_size
    matrices = V * D + D * 16 + 2 * D * 8 + 16 * D + 3 * D * F
    vectors = 3 * D
    assert dry_run.state_bytes(state.policy.params) == 4 * (matrices + vectors)
    assert dry_run.device_bytes(state.policy.params) == 4 * (matrices // 8 + vectors)  # every matrix is sharded over fsdp = 8
    [(_, rows, length, flops)] = dry_run.row_programs(run, phase)
    layer = matrices - V * D
    assert (rows, length) == (32, 28)
    assert flops == 3 * 32 * (2 * layer * 28 + 2 * 16 * 28 * 28 + 2 * V * D * 28)
    assert dry_run.sample_flops(run, 4, 2) < dry_run.forward_flops(run.cfg, 8, 28)  # the prompt is read once per group


@pytest.mark.parametrize(
    "key, value, where",
    [
        ("prm.data", ("absent.jsonl",), "absent.jsonl"),  # a data file of a later phase
        ("rl.kl_kind", "k9", "kl_kind"),  # found only where the step is traced
    ],
)
def test_a_dry_run_finds_what_training_would_refuse_late(tmp_path, key, value, where):
    config = tiny(tmp_path / "new").copy_and_resolve_references().unlock()
    config.prm.steps, config.rl.kl_coef = int(key == "prm.data"), 0.1
    config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError) as error:
        dry_run.run(config.lock())
    assert where in error.value.where and all(parts(error))


# ------------------------------------------------------------------------------------------------ evaluate


@pytest.mark.parametrize("step", [SFT, None])
def test_evaluate_repeats_the_runs_own_numbers_exactly(trained, step):
    assert evaluate.run(load_saved(trained).lock(), step=step) == 0
    at = step or END
    [logged] = [row for row in read_metrics(trained / "metrics.jsonl") if row["phase"] == "eval" and row["step"] == at]
    again = json.loads((trained / f"evaluation_{at:06d}.json").read_text())
    logged = {k: v for k, v in logged.items() if k.startswith("eval/")}
    if step == SFT:  # the run looks once its PRM is there, a copy of its reference; this checkpoint was written before
        logged = {k: v for k, v in logged.items() if "prm" not in k}
    assert again["metrics"] == logged and again["step"] == at
    assert 0 < logged["eval/accuracy"] < 1 and logged["eval/pass_at_4"] > logged["eval/accuracy"]
    assert ("eval/prm_first_error_f1" in logged) == (at == END)


def test_evaluating_a_model_that_was_never_trained(trained, tmp_path):
    export.run(load_saved(trained).lock(), out=str(tmp_path / "policy"))
    config = load_saved(trained)
    config.model.path, config.workdir = str(tmp_path / "policy"), str(tmp_path / "fresh")
    assert evaluate.run(config.lock()) == 0
    [of_run] = [r for r in read_metrics(trained / "metrics.jsonl") if r["phase"] == "eval" and r["step"] == END]
    plain = json.loads((tmp_path / "fresh" / "evaluation_000000.json").read_text())
    assert plain["metrics"]["eval/accuracy"] == of_run["eval/accuracy"]
    assert "eval/prm_best_of_4" not in plain["metrics"]


# ------------------------------------------------------------------------------------------------ score


@pytest.fixture(scope="module")
def scored(trained, solutions, tmp_path_factory):
    out = tmp_path_factory.mktemp("scored") / "scores.jsonl"
    assert score.run(load_saved(trained).lock(), rows=str(solutions), out=str(out), tokens=True, threshold=0.0) == 0
    return lines(out)


def test_scores_by_step_token_and_outcome_agree(scored):
    assert [row["row"] for row in scored] == [0, 1, 4]  # row 2 is too long, row 3 has no response
    for row in scored:
        tokens, single = np.array(row["token_rewards"]), np.array(row["single"])
        assert np.abs(tokens).max() > 1e-4  # the PRM has left its reference
        np.testing.assert_allclose(tokens.sum(), row["outcome"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.cumsum(single), row["accumulative"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row["accumulative"][-1], row["outcome"], rtol=1e-5, atol=1e-6)
        below = [k for k, x in enumerate(single) if x < 0]
        assert row["first_error"] == (below[0] if below else -1)
    text, steps, merged = scored
    assert text["steps"] == steps["steps"] == ["3+1=4;", "#2"] and merged["steps"] == ["3+1=4;#2"]
    assert text["tokens"] == steps["tokens"] and text["single"] == steps["single"]
    np.testing.assert_allclose(sum(text["single"][:1]), sum(text["token_rewards"][:6]), rtol=1e-5, atol=1e-6)


def test_the_account_of_rows_is_printed(trained, solutions, tmp_path, capsys):
    score.run(load_saved(trained).lock(), rows=str(solutions), out=str(tmp_path / "o.jsonl"))
    text = capsys.readouterr().out
    assert "5 rows in, 3 out" in text and "config.sampling.max_new" in text and "empty response" in text


def test_the_threshold_of_the_runs_evaluation_is_taken(trained, solutions, tmp_path):
    run = build(load_saved(trained).lock())
    [of_run] = [r for r in read_metrics(trained / "metrics.jsonl") if r["phase"] == "eval" and r["step"] == END]
    assert score.logged_threshold(run, END) == of_run["eval/prm_threshold"]
    assert score.logged_threshold(run, 1) is None
    written = trained / "evaluation_000001.json"
    written.write_text(json.dumps({"metrics": {"eval/prm_threshold": -0.25}}))
    assert score.logged_threshold(run, 1) == -0.25
    written.unlink()


def test_an_exported_pair_scores_as_the_checkpoint_does(trained, solutions, scored, tmp_path):
    for role in ("prm", "reference"):
        assert export.run(load_saved(trained).lock(), out=str(tmp_path / role), role=role) == 0
    config = load_saved(trained)
    config.workdir, config.model.path, config.prm.path = (
        str(tmp_path / "none"),
        str(tmp_path / "reference"),
        str(tmp_path / "prm"),
    )
    out = tmp_path / "scores.jsonl"
    assert (
        score.run(config.copy_and_resolve_references().lock(), rows=str(solutions), out=str(out), tokens=True, threshold=0.0) == 0
    )
    assert lines(out) == scored
    config.prm.beta = 0.05
    with pytest.raises(UserError) as error:
        score.run(config.lock(), rows=str(solutions), out=str(tmp_path / "b.jsonl"))
    found, expected, where, fix = parts(error)
    assert "0.05" in found and "0.5" in expected and where == "config.prm.beta" and fix == "Set config.prm.beta=0.5"


# ------------------------------------------------------------------------------------------------ sample


def test_samples_carry_the_tasks_verdicts(trained, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"question": "3+1-2=", "answer": 2}, {"question": "1+1+1="}, {"question": "1+" * 20 + "1=", "answer": 21}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_saved(trained)
    assert sample.run(config.lock(), prompts=str(prompts), out=str(out)) == 0
    written = lines(out)
    assert [(row["row"], row["sample"]) for row in written] == [(r, g) for r in (0, 1) for g in range(4)]  # row 2 is too long
    task = build(config).task
    for row in written:
        assert row["logp"] < 0 and 1 <= row["tokens"] <= 20 and row["stopped"] == (row["tokens"] < 20 or row["stopped"])
        assert (row["score"] is None) == (row["row"] == 1)
        if row["row"] == 0:
            problem = sample.Problem(0, "3+1-2=", "2")
            assert row["score"] == task.verify([problem], [row["response"]])[0].score


def test_prompts_without_any_answers(trained, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "3+1-2="}\n')
    assert sample.run(load_saved(trained).lock(), prompts=str(prompts), out=str(out)) == 0
    assert [row["score"] for row in lines(out)] == [None] * 4


def test_a_run_that_fails_leaves_no_file(trained, tmp_path, monkeypatch):
    def break_off(*args):
        yield {"row": 0, "score": None}
        raise KeyboardInterrupt

    (tmp_path / "p.jsonl").write_text('{"prompt": "3+1-2="}\n')
    monkeypatch.setattr(sample, "draw_all", break_off)
    with pytest.raises(KeyboardInterrupt):
        sample.run(load_saved(trained).lock(), prompts=str(tmp_path / "p.jsonl"), out=str(tmp_path / "out.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


# ------------------------------------------------------------------------------------------------ export


def test_export_loads_in_transformers(trained, tmp_path):
    torch, transformers = needs("torch"), needs("transformers")
    config = load_saved(trained).lock()
    assert export.run(config, out=str(tmp_path / "policy"), step=SFT) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    state, _ = restore_roles(build(config), ("policy",), step=SFT)
    assert int(state.step) == SFT and state.prm is None and state.reference is None
    mine = np.asarray(state.policy.params["embed"])
    assert model.dtype == torch.float32
    np.testing.assert_array_equal(model.get_input_embeddings().weight.detach().numpy(), mine)


# ------------------------------------------------------------------------------------------------ training


def test_training_shows_a_marked_row_first(tmp_path, capsys):
    config = tiny(tmp_path / "run").copy_and_resolve_references().unlock()
    config.sft.steps, config.rl.iterations, config.eval.problems = 1, 0, 0
    assert loop.run(config.lock()) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("first row of sft")]
    prompt, response = line.split("[prompt] ")[1].split(" [response] ")
    assert prompt.endswith("=") and ";|" in response and "<eos>" in response and "\033" not in line
    assert response.count("|") + 1 == int(response.rpartition(", ")[2].split()[0])


def test_training_asks_for_space_before_it_allocates(tmp_path, monkeypatch):
    from jprm.train import saver

    monkeypatch.setattr(saver.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    monkeypatch.setattr(loop, "start_or_resume", lambda *args: pytest.fail("allocated"))
    with pytest.raises(UserError) as error:
        loop.run(tiny(tmp_path / "run"))
    found, expected, where, fix = parts(error)
    assert "MiB free" in found and "3 kept" in expected and where == "config.workdir" and "Make room" in fix


# ------------------------------------------------------------------------------------------------ bad input


def no_checkpoint(verb, **flags):
    return lambda run, tmp: verb.run(tiny(tmp / "never"), **{k: str(tmp / v) for k, v in flags.items()})


# what is done -> (found, expected, where, fix), each a part of what is said.
def failing(verb, file="p.jsonl", out="x", **flags):
    name = "rows" if verb is score else "prompts"
    return lambda run, tmp: verb.run(run, **({} if verb is export else {name: str(tmp / file)}), out=str(tmp / out), **flags)


BAD = {
    "evaluate nothing": (no_checkpoint(evaluate), "no checkpoint", "config.model.path", "never/checkpoints", "--workdir"),
    "export nothing": (no_checkpoint(export, out="x"), "no checkpoint", "has saved one", "never/checkpoints", "--workdir"),
    "sample from nothing": (
        no_checkpoint(sample, prompts="p.jsonl", out="x"),
        *("no checkpoint", "has saved one", "never/checkpoints", "--workdir"),
    ),
    "score with nothing": (
        no_checkpoint(score, rows="r.jsonl", out="x"),
        *("no checkpoint", "has saved one", "never/checkpoints", "--workdir"),
    ),
    "no such step": (lambda run, tmp: evaluate.run(run, step=7), "step 7", "000201, ", "checkpoints", "Name a step"),
    "no such role": (failing(export, role="prm", step=SFT), "no prm, only policy", "the prm", "checkpoint 200", "--step"),
    "a taken file": (failing(sample, out="p.jsonl"), "an existing file", "not taken", "--out=", "Give another"),
    "no threshold": (failing(score, "r.jsonl", threshold=float("nan")), "nan", "finite", "--threshold", "Leave it out"),
    "a folder for a file": (failing(sample, out="empty"), "a folder", "not taken", "--out=", "Give another"),
    "a taken folder": (failing(export, out="."), "not empty", "not taken", "--out=", "Give another"),
    "no folder to write into": (failing(score, out="a/b"), "no folder", "existing folder", "--out=", "mkdir"),
    "no file of prompts": (failing(sample, "none.jsonl"), "no file", "readable", "none.jsonl", "Give the path"),
    "no column of prompts": (failing(sample, "bad.jsonl"), "columns a", "a prompt", "bad.jsonl", "prompt_column"),
    "no column of solutions": (failing(score, "p.jsonl"), "columns prompt", "steps", "p.jsonl", "Rename"),
    "no row that fits": (failing(sample, "long.jsonl"), "1 rows in, 0 out", "prompts", "long.jsonl", "Mend"),
}


@pytest.mark.parametrize("call, found, expected, where, fix", BAD.values(), ids=BAD)
def test_bad_input_is_said_in_four_parts(trained, tmp_path, call, found, expected, where, fix):
    (tmp_path / "p.jsonl").write_text('{"prompt": "3+1-2="}\n')
    (tmp_path / "r.jsonl").write_text('{"prompt": "3+1-2=", "response": "#2"}\n')
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1+" * 30 + "1="}) + "\n")
    (tmp_path / "empty").mkdir()
    names = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UserError) as error:
        call(load_saved(trained).lock(), tmp_path)
    for said, part in zip(parts(error), (found, expected, where, fix)):
        assert part in said, error.value
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_config_of_another_shape_is_refused(trained, tmp_path):
    config = load_saved(trained)
    config.model.num_layers = 2
    with pytest.raises(UserError) as error:
        evaluate.run(config.lock())
    assert "model.num_layers" in error.value.found and "Set config.model.num_layers=1" in error.value.fix


def test_the_command_line_reaches_a_verb(trained, tmp_path, solutions):
    out = tmp_path / "s.jsonl"
    assert (
        cli.main(["score", f"--workdir={trained}", f"--rows={solutions}", f"--out={out}", "--threshold=0.5", "eval.batch=8"]) == 0
    )
    assert len(lines(out)) == 3
