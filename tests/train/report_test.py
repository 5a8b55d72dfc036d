"""report.html over a made-up run of every phase: what is in the page, what cannot get out of its data, and what bounds it."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jprm.errors import UserError
from jprm.train import report, report_curves, report_rollouts
from jprm.train.config import default_config

HOSTILE = (
    '</script><script>document.title="owned"</script><img src=x onerror=\'document.title="owned"\'> & <!-- '
    "\u2028 \ud800 \u202e $title"
)


def rollout(rng, step, row, *, right, phase="rl", group=8):
    """One samples/ row of the arithmetic chain: `17+5-9=` -> `17+5=22;22-9=13;#13`, wrong from one step on unless `right`."""
    prompt_rng = np.random.default_rng(1000 * step + row // group)
    operands, signs = prompt_rng.integers(1, 20, 5), prompt_rng.choice([1, -1], 4)
    prompt = str(operands[0]) + "".join(f"{'+' if s > 0 else '-'}{o}" for s, o in zip(signs, operands[1:])) + "="
    wrong_from = None if right else int(rng.integers(0, 4))
    lines, value, truth = [], int(operands[0]), int(operands[0])
    for k, (sign, operand) in enumerate(zip(signs, operands[1:])):
        new = value + int(sign * operand) + (int(rng.integers(1, 4)) if k == wrong_from else 0)
        lines.append(f"{value}{'+' if sign > 0 else '-'}{operand}={new};")
        value, truth = new, truth + int(sign * operand)
    lines.append(f"#{value}")
    tokens, steps, rewards = [], [], []
    for k, line in enumerate(lines):
        hurt = wrong_from is not None and k >= wrong_from
        for token in [*re.findall(r"\d|\D", line), *(["<eos>"] if k == len(lines) - 1 else [])]:
            tokens.append(token)
            steps.append(k)
            rewards.append(float(rng.normal(-0.05 if hurt else 0.03, 0.04) - (0.22 if k == wrong_from and token == ";" else 0)))
    scores = [sum(r for r, s in zip(rewards, steps) if s == k) for k in range(len(lines))]
    returns = np.cumsum(rewards[::-1])[::-1]
    advantages = returns - returns.mean() + (0.5 if right else -0.3)
    return {
        "step": step, "phase": phase, "row": row, "prompt_id": row // group, "prompt": prompt, "response": "".join(tokens[:-1]),
        "tokens": tokens, "outcome": float(right), "known": True, "valid": True, "answer": str(truth), "token_rewards": rewards,
        "step_of_token": steps, "step_scores": scores, "returns": returns.tolist(), "advantages": advantages.tolist(),
        "first_error": -1 if right else wrong_from, "stop": "eos",
    }


def write_run(workdir: Path, *, sft=300, prm=20, rl=80, rows=32, resume=True, seed=0) -> Path:
    """A run as the trainer leaves it: config, metrics of every phase with gaps, samples of every fifth iteration, summary."""
    rng = np.random.default_rng(seed)
    (workdir / "samples").mkdir(parents=True)
    config = default_config().to_dict()
    config["rl"]["iterations"] = rl
    (workdir / "config.json").write_text(json.dumps(config))
    (workdir / "summary.json").write_text(json.dumps({
        "accuracy_before": 0.272, "accuracy_after": 0.648, "greedy_before": 0.451, "greedy_after": 0.702,
        "pass_at_8_before": 0.874, "pass_at_8_after": 0.861,
        "prm_first_error_f1": 48.1, "prm_first_error_f1_chance": 19.3,
        "majority_at_8": 0.741,
        "prm_best_of_8": 0.768, "seconds": 341.7}))
    lines, clock = [], 0.0

    def log(step, phase, took, **values):
        nonlocal clock
        clock += took
        named = {k.replace("__", "/"): v for k, v in values.items()}
        lines.append({"step": step, "phase": phase, "time_s": round(clock, 3), **named})

    def evaluate(step, accuracy):
        log(step, "eval", 2.0, eval__accuracy=accuracy, eval__greedy=accuracy + 0.12, eval__pass_at_8=0.87 - 0.01 * accuracy)

    for i in range(1, sft + 1):
        took = 0.1 * (1 + 0.2 * rng.random()) + (9.0 if i == 1 else 0)
        log(i, "sft", took, sft__loss=2.9 * math.exp(-i / 60) + 0.55 + 0.05 * rng.normal(), sft__lr=1e-3 * (1 - i / sft),
            sft__grad_norm=abs(1 + 0.3 * rng.normal()), timing_s__step=took * 0.97, timing_s__iteration=took)
    if sft:
        evaluate(sft, 0.272)

    def prm_values(i):
        return {"prm__loss": 0.69 - 0.1 * (1 - math.exp(-i / 25)) + 0.01 * rng.normal(),
                "prm__auc": 0.5 + 0.16 * (1 - math.exp(-i / 20)) + 0.02 * rng.normal(),
                "prm__pair_accuracy": 0.52 + 0.02 * rng.normal(), "prm__grad_norm": abs(0.4 + 0.1 * rng.normal()),
                "prm__lr": 1e-4}

    for i in range(1, prm + 1):
        log(sft + i, "prm", 0.9, **prm_values(i), timing_s__gen=0.5, timing_s__step=0.35, timing_s__iteration=0.9)
    for i in range(1, rl + 1):
        step, share = sft + prm + i, 1 - math.exp(-i / 30)
        gap = 30 <= i < 34  # a skipped update: no loss, no gradient norm
        gen, verify, own = 0.62 + 0.05 * rng.random(), 0.04 + 0.02 * rng.random(), 0.7 + 0.04 * rng.random()
        own += 14.0 if i == 1 else 0.0  # compilation
        log(step, "rl", gen + verify + own + 0.05, critic__score__mean=0.27 + 0.4 * share + 0.03 * rng.normal(),
            response_length__mean=31 - 2 * share + 0.4 * rng.normal(), actor__loss=None if gap else 0.02 * rng.normal(),
            actor__grad_norm=None if gap else abs(0.5 + 0.1 * rng.normal()),
            actor__entropy=0.42 - 0.2 * share + 0.01 * rng.normal(),
            actor__kl=0.05 * share + 0.002 * rng.random(), actor__clip_fraction=0.01 * rng.random(), actor__lr=1e-4,
            **prm_values(prm + i), timing_s__gen=gen,
            timing_s__verify=verify, timing_s__step=own, timing_s__iteration=gen + verify + own + 0.05)
        if i % 20 == 0:
            evaluate(step, 0.27 + 0.4 * share)
        if resume and i == 45:  # killed here; 41..45 are written again by the resumed run
            clock -= 6.0
            for again in range(41, 46):
                log(sft + prm + again, "rl", 1.3, critic__score__mean=0.5)
        if i % 5 == 0 or i == 1:
            samples = [rollout(rng, step, r, right=rng.random() < 0.27 + 0.4 * share) for r in range(rows)]
            samples[-1].update(outcome=None, known=False)
            (workdir / "samples" / f"{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workdir


def data_of(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.S)
    assert len(found) == 1
    return json.loads(found[0], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return report.write_report(write_run(tmp_path_factory.mktemp("runs") / "prime_arithmetic"))


# --- what is in the page ---


def test_page_holds_every_part_of_the_run(page):
    data = data_of(page)
    assert page.name == "report.html" and data["name"] == "prime_arithmetic"
    assert [(p["name"], p["start"], p["end"]) for p in data["phases"]] == [("sft", 1, 300), ("prm", 301, 320), ("rl", 321, 400)]
    assert data["evals"] == [300, 340, 360, 380, 400]
    assert data["resumed"] == [361]
    assert ("Task", "arithmetic") in [tuple(pair) for pair in data["highlights"]]
    assert ["rl.optimizer.lr", "0.0001"] in data["config"]
    drawn = {key for group in data["groups"] for panel in group["panels"] for key in panel["keys"]}
    listed = {text.split(" ")[0] for text in data["flat"]}
    assert drawn | listed == set(data["series"]) and not drawn & listed  # nothing is left out
    assert {"sft/loss", "critic/score/mean", "prm/auc", "actor/entropy", "actor/kl",
            "response_length/mean", "eval/greedy"} <= drawn
    assert not [name for name in page.parent.iterdir() if name.name.startswith(".report")]


def test_page_is_self_contained(page):
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'`]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link[^>]+href=\"(?!data:)|<script[^>]+src=|@import|url\(|\bfetch\(|XMLHttpRequest|innerHTML", text)
    assert "default-src 'none'" in text
    assert page.stat().st_size < 2_500_000


def test_headline_pairs_before_with_after_and_f1_with_chance():
    rows = {row["label"]: row for row in report.headline({
        "accuracy_before": 0.25, "accuracy_after": 0.625, "pass_at_8_before": 0.9, "pass_at_8_after": 0.85,
        "prm_first_error_f1": 48.0, "prm_first_error_f1_chance": 19.5,
        "seconds": 341.7, "majority_at_8": 0.5, "not_a_number": float("nan"), "text": "x"})}
    assert list(rows) == ["Sampled accuracy", "Pass@8", "PRM first-error F1", "Majority of 8", "Wall time"]
    assert [rows["Sampled accuracy"][column] for column in ("before", "after", "change")] == ["25.0 %", "62.5 %", "+37.5"]
    assert rows["Pass@8"]["change"] == "\u22125.0"
    assert [rows["PRM first-error F1"][column] for column in ("against", "before", "to")] == ["chance", "19.5 %", 0.48]
    assert rows["Majority of 8"]["before"] is None and rows["Wall time"]["after"] == "5 min 42 s"


def test_highlights_are_fields_of_the_config():
    config = dict(report.flatten(default_config().to_dict()))
    assert [key for _, key in report.HIGHLIGHTS if key not in config] == []
    assert {"Prompts", "PRM beta"} <= set(dict(report.highlights(config | {"rl.iterations": "80"})))
    assert "Prompts" not in dict(report.highlights(config | {"rl.iterations": "0"}))


# --- gaps, missing parts, damage ---


def test_null_and_nan_are_gaps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "rl", "actor/loss": 0.5, "actor/kl": null}\n'
                                            '{"step": 2, "phase": "rl", "actor/loss": null, "actor/kl": NaN}\n'
                                            '{"step": 3, "phase": "rl", "actor/loss": Infinity, "actor/kl": null}\n'
                                            '{"step": 4, "phase": "rl", "actor/loss": 0.25}\n')
    data = data_of(report.write_report(tmp_path))
    assert data["series"] == {"actor/loss": {"x": [1, 2, 3, 4], "y": [0.5, None, None, 0.25]}}  # kl never had a value: no panel
    assert [(g["title"], [p["title"] for p in g["panels"]]) for g in data["groups"]] == [("Policy", ["Loss"])]
    assert data["times"] == [] and data["headline"] == [] and data["rollouts"]["iterations"] == []


def test_unnamed_metrics_get_panels_of_their_own():
    groups = {g["title"]: g["panels"] for g in report_curves.panels_of(["actor/ratio_max", "actor/loss", "memory/peak_gib"])}
    assert groups["Policy"] == [{"title": "Loss", "keys": ["actor/loss"]}, {"title": "Ratio max", "keys": ["actor/ratio_max"]}]
    assert groups["memory"] == [{"title": "Peak gib", "keys": ["memory/peak_gib"]}]


@pytest.mark.parametrize("make", [lambda d: None, lambda d: (d / "metrics.jsonl").touch(), lambda d: (d / "samples").mkdir()],
                         ids=["nothing", "empty metrics", "empty samples"])
def test_empty_run_says_so(tmp_path, make):
    make(tmp_path)
    page = report.write_report(tmp_path)
    assert "Nothing recorded yet" in page.read_text(encoding="utf-8") and data_of(page)["groups"] == []


def test_run_with_data_does_not_say_that_it_is_empty(page):
    assert "Nothing recorded yet" not in page.read_text(encoding="utf-8")


def test_damaged_lines_are_counted_not_fatal(tmp_path):
    lines = ['{"step": 1, "phase": "sft", "sft/loss": 2.0}', "[1]", '{"step": "x"}', '{"step": 2, "pha']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "summary.json").write_text("[1, 2]")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "000001.jsonl").write_text('{"step": 1, "phase": "rl"}\nnot json\n')
    data = data_of(report.write_report(tmp_path))
    assert data["series"]["sft/loss"] == {"x": [1], "y": [2.0]}
    assert [note.split(" ")[0] for note in data["notes"]] == ["summary.json", "metrics.jsonl:", "samples/:"]
    assert "3 lines" in data["notes"][1]
    assert data["rollouts"]["iterations"][0]["rows"][0]["verdict"] == "unknown"


def test_a_missing_workdir_is_the_users_error(tmp_path):
    with pytest.raises(UserError) as caught:
        report.write_report(tmp_path / "gone")
    error = caught.value
    assert "gone" in error.found and error.where == "workdir"
    assert "workdir of a run" in error.expected and "metrics.jsonl" in error.fix
    assert not (tmp_path / "gone").exists()


# --- bounds ---


def test_thin_keeps_spikes_and_gaps():
    y = [0.0] * 5000
    y[1234], y[4000] = 9.0, -9.0
    y[2000:2100] = [None] * 100
    x, kept = report_curves.thin(list(range(5000)), y, 200)
    assert len(x) <= 200 and x == sorted(x)
    assert kept[x.index(1234)] == 9.0 and kept[x.index(4000)] == -9.0 and None in kept


def test_phase_times_total_all_iterations_whatever_the_bars_show():
    rows = [{"step": i, "phase": "rl", "timing_s/gen": 2.0, "timing_s/step": 1.0, "timing_s/iteration": 3.5} for i in range(1000)]
    (times,) = report_curves.phase_times(rows)
    assert (times["parts"], times["totals"], times["count"]) == (["gen", "step", "other"], [2000.0, 1000.0, 500.0], 1000)
    assert len(times["bars"]) <= report_curves.MAX_BARS
    assert times["bars"][-1][1] == 999 and times["bars"][0][2:] == [2.0, 1.0, 0.5]


@pytest.mark.parametrize("counts, most, want", [
    ([10, 2, 10], 12, [5, 2, 5]), ([3, 3], 100, [3, 3]),
    ([1, 1, 1, 1, 1], 3, [1, 0, 1, 0, 1]), ([5, 5], 1, [1, 0]), ([], 5, []), ([4], 0, [0])])
def test_shares(counts, most, want):
    assert report_rollouts.shares(counts, most) == want


def test_rollouts_are_capped_evenly_and_the_rest_is_counted(tmp_path):
    write_run(tmp_path / "run", sft=0, prm=0, rl=40, rows=32)  # 9 files of 32
    data = data_of(report.write_report(tmp_path / "run", max_rollouts=90))["rollouts"]
    assert (data["total"], data["embedded"]) == (288, 90)
    assert [len(it["rows"]) for it in data["iterations"]] == [10] * 9
    assert all(it["total"] == 32 and sum(it["counts"].values()) == 32 for it in data["iterations"])
    assert [row["row"] for row in data["iterations"][0]["rows"]] == list(range(10))  # the first rows: groups stay whole


def test_rollouts_are_bounded_in_bytes_too(tmp_path):
    write_run(tmp_path / "run", sft=0, prm=0, rl=10)
    data = report_rollouts.read_rollouts(tmp_path / "run" / "samples", most_bytes=40_000)
    assert len(json.dumps(data["iterations"])) <= 40_000 and 0 < data["embedded"] < data["total"] == 96


def test_a_long_response_is_cut_and_says_by_how_much():
    n = report_rollouts.MAX_TOKENS + 7
    row = report_rollouts.embedded({"tokens": ["a"] * n, "token_rewards": [0.1] * n, "step_of_token": [0] * n})
    assert [len(row[column]) for column in ("tokens", "rewards", "steps")] == [report_rollouts.MAX_TOKENS] * 3
    assert row["cut"] == 7


def test_rows_with_missing_columns_still_show():
    row = report_rollouts.embedded({"response": "abc", "outcome": float("nan"), "token_rewards": [1.0, 2.0],
                                      "step_of_token": None})
    assert row["tokens"] == ["abc"] and row["rewards"] == [1.0] and row["steps"] == [-1]
    short = report_rollouts.embedded({"tokens": ["a", "b"], "token_rewards": [1.0], "step_of_token": [0]})
    assert (short["rewards"], short["steps"]) == ([1.0, None], [0, -1])
    assert row["verdict"] == "unknown" and not {"outcome", "returns", "advantages", "first_error", "scores"} & set(row)


@pytest.mark.parametrize("row, want", [
    ({"outcome": 1.0, "known": True, "valid": True}, "correct"), ({"outcome": 0.0, "known": True, "valid": True}, "wrong"),
    ({"outcome": 0.0, "known": False, "valid": True}, "unknown"),
    ({"outcome": None}, "unknown"), ({"outcome": 1.0, "valid": False}, "correct"), ({"valid": False}, "filler")])
def test_verdict(row, want):
    assert report_rollouts.verdict(row) == want


# --- escaping ---


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("runs") / "hostile & <b>run<", sft=10, prm=5, rl=10)
    bad = rollout(np.random.default_rng(0), 15, 0, right=False) | {
        "prompt": HOSTILE, "response": HOSTILE, "tokens": [HOSTILE, *HOSTILE], "answer": HOSTILE,
        "stop": HOSTILE, "phase": HOSTILE}
    (run / "samples" / "000015.jsonl").write_text(json.dumps(bad) + "\n")
    (run / "config.json").write_text(json.dumps({HOSTILE: HOSTILE, "task": {"name": HOSTILE}}))
    (run / "summary.json").write_text(json.dumps({HOSTILE: 1.0}))
    with open(run / "metrics.jsonl", "a") as out:
        out.write(json.dumps({"step": 26, "phase": "rl", f"group/{HOSTILE}": 1.0}) + "\n" + "not a line\n")
    return report.write_report(run)


def test_hostile_text_stays_data(hostile_page):
    text = hostile_page.read_text(encoding="utf-8")
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<img" not in text and "<!--" not in text
    assert "<title>hostile &amp; &lt;b&gt;run&lt; · jprm report</title>" in text
    data = data_of(hostile_page)
    whole = HOSTILE.replace("\ud800", "\ufffd")  # half a surrogate pair is no text
    row = next(row for it in data["rollouts"]["iterations"] for row in it["rows"] if row["prompt"] == whole)
    assert row["tokens"][0] == whole and row["answer"] == whole  # and nothing was lost by it


# --- in a browser ---


def chromium() -> str:
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    return found or pytest.skip("no chromium on this machine")


@pytest.mark.slow
@pytest.mark.parametrize("which", ["page", "hostile_page", "empty"])
def test_opens_offline_without_console_errors(which, request, tmp_path):
    browser = chromium()
    path = report.write_report(tmp_path) if which == "empty" else request.getfixturevalue(which)
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking",
         "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
         "--window-size=1280,2400", "--virtual-time-budget=4000", "--dump-dom", path.resolve().as_uri()],
        capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "<title>owned" not in done.stdout
    body = done.stdout.split('id="data"')[0]
    assert "<h1>" in body  # the script ran
    shown = body.split('id="config"')[0]  # a config may well say false
    assert not re.search(r">(false|null|undefined|NaN)<|\[object", shown)
    if which == "hostile_page":
        assert "1 line could not be read" in body and "<img" not in body
    if which == "page":
        assert body.count("<figure") == len([p for g in data_of(path)["groups"] for p in g["panels"]])
        assert 'class="tok pos"' in body and 'class="tok neg"' in body


def test_curves_that_say_nothing_are_listed_not_drawn():
    step = [1, 2, 3]
    series = {
        "critic/unknown": {"x": step, "y": [0.0, 0.0, 0.0]},
        "critic/kept_prompts": {"x": step, "y": [0.5, 0.25, 0.5]},
        "eval/majority_at_8": {"x": [0, 3], "y": [0.25, 0.5]},
        "prm/loss": {"x": step, "y": [0.5, 0.5, 0.5]},  # a named panel: its absence would be missed
    }
    assert report_curves.flat(series) == {
        "critic/unknown": "critic/unknown 0",
        "eval/majority_at_8": "eval/majority_at_8 0.25 → 0.5",
    }
