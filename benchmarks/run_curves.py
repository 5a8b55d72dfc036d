"""Curves of a recorded run as one picture for docs/runs, and the figures its table needs.

    python -m benchmarks.run_curves runs/smollm2_word_problems docs/runs/smollm2_word_problems.png

Needs matplotlib, which jprm does not install. Printed: accuracy before and after with intervals (the problems are drawn again
with replacement, 10,000 times, the same ones for both) and seconds per stage.
"""

import argparse
import json
import pathlib
from typing import Any

import numpy as np

from jprm.train.report_curves import metrics_rows

INK, MUTED, BLUE, ORANGE, GREEN = "#222222", "#8a8a8a", "#2864ad", "#c8641b", "#3b8a4f"


def column(rows: list[dict], phase: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric; a value that was not finite is nan."""
    found = [(row["step"], row[key]) for row in rows if row["phase"] == phase and key in row]
    return np.array([s for s, _ in found]), np.array([np.nan if v is None else v for _, v in found], float)


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last ``width`` finite values at each place."""
    return np.array(
        [np.nanmean(w) if np.isfinite(w := values[max(0, i - width + 1) : i + 1]).any() else np.nan for i in range(len(values))]
    )


def draw(rows: list[dict], resumed: list[int], target: pathlib.Path) -> None:
    """Six panels over iterations: losses, accuracy, the PRM, the policy, seconds by stage."""
    import matplotlib
    import matplotlib.ticker

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes_of = {"axes.edgecolor": MUTED, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False}
    plt.rcParams.update({"font.size": 9} | axes_of)
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), layout="constrained")
    (loss, accuracy, auc), (entropy, length, seconds) = axes

    steps, values = column(rows, "sft", "sft/loss")
    loss.plot(steps, values, color=BLUE, lw=1.3)
    loss.set_title("Warm start: loss (nats a token)")

    steps, values = column(rows, "rl", "critic/score/mean")
    accuracy.plot(steps, values, ".", color=MUTED, ms=4, label="sampled in training, 32 a round")
    accuracy.plot(steps, running_mean(values, 8), color=BLUE, lw=1.5, label="its mean over 8 rounds")
    for key, color, label in (("eval/accuracy", ORANGE, "held out, sampled"), ("eval/greedy", GREEN, "held out, greedy")):
        at, share = column(rows, "eval", key)
        count = column(rows, "eval", "eval/problems")[1]
        accuracy.errorbar(
            at, share, 1.96 * np.sqrt(share * (1 - share) / count), fmt="o", color=color, ms=5, capsize=3, lw=1.2, label=label
        )
    accuracy.set_ylim(0, 1.45 * accuracy.get_ylim()[1])  # room for the legend
    accuracy.legend(frameon=False, fontsize=7.5, loc="upper left", ncols=2)
    accuracy.set_title("Accuracy (bars: 95 %)")

    steps, values = column(rows, "rl", "prm/auc")
    auc.axhline(0.5, color=MUTED, lw=0.8, ls=":")
    auc.plot(steps, values, ".", color=MUTED, ms=4)
    auc.plot(steps, running_mean(values, 8), color=BLUE, lw=1.5)
    auc.set_title("PRM: AUC before each update")

    for axis, key, name in (
        (entropy, "actor/entropy", "Policy: entropy (nats a token)"),
        (length, "response_length/mean", "Response length (tokens)"),
    ):
        steps, values = column(rows, "rl", key)
        axis.plot(steps, values, color=BLUE, lw=1.3)
        axis.set_title(name)

    steps, below = column(rows, "rl", "timing_s/step")[0], 0.0
    for key, color in (("gen", ORANGE), ("verify", GREEN), ("step", BLUE)):
        values = np.nan_to_num(column(rows, "rl", f"timing_s/{key}")[1])
        seconds.bar(steps, values, bottom=below, color=color, width=0.8, label=key)
        below = below + values
    seconds.set_ylim(0, 1.25 * seconds.get_ylim()[1])
    seconds.legend(frameon=False, fontsize=7.5, loc="upper left", ncols=3)
    seconds.set_title("Seconds an iteration")

    for axis in axes.flat:
        axis.set_xlabel("iteration")
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        lo, hi = axis.get_xlim()
        for step in resumed:
            if lo <= step <= hi:
                axis.axvline(step + 0.5, color=INK, lw=0.8, ls="--")
                form = dict(rotation=90, va="bottom", ha="right", fontsize=7, color=INK)
                axis.annotate("resumed", (step + 0.5, 0.02), xycoords=("data", "axes fraction"), **form)
    figure.savefig(target, dpi=110)


def outcomes(workdir: pathlib.Path, step: int) -> dict[int, float]:
    """Sampled held-out responses of an evaluation: {problem: right}."""
    path = workdir / "samples" / f"{step:06d}_eval.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["prompt_id"]: float(bool(row["known"]) and row["outcome"] > 0.5) for row in rows}


def intervals(before: np.ndarray, after: np.ndarray, draws: int = 10_000) -> dict[str, tuple[float, float, float]]:
    """Mean and 95 % interval of both and of their difference, problems drawn again in pairs."""
    pick = np.random.default_rng(0).integers(0, len(before), (draws, len(before)))
    parts = {"before": before[pick].mean(1), "after": after[pick].mean(1)}
    parts["difference"] = parts["after"] - parts["before"]
    means = {"before": before.mean(), "after": after.mean(), "difference": (after - before).mean()}
    return {k: (float(means[k]), *(float(q) for q in np.quantile(v, (0.025, 0.975)))) for k, v in parts.items()}


def summary(rows: list[dict], workdir: pathlib.Path) -> dict[str, Any]:
    out: dict[str, Any] = {"median seconds": {}}
    for phase in ("sft", "rl"):
        for key in ("gen", "verify", "step", "iteration"):
            values = column(rows, phase, f"timing_s/{key}")[1]
            if len(values):
                out["median seconds"][f"{phase} {key}"] = round(float(np.nanmedian(values)), 3)
    steps, greedy = column(rows, "eval", "eval/greedy")
    out["greedy"] = dict(zip(steps.tolist(), greedy.round(4).tolist()))
    if len(steps) > 1:
        first, last = outcomes(workdir, steps[0]), outcomes(workdir, steps[-1])
        both = sorted(first.keys() & last.keys())
        out["problems compared"] = len(both)
        out |= intervals(np.array([first[i] for i in both]), np.array([last[i] for i in both]))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    parser.add_argument("--resumed", default="", help="checkpoints it went on from, to be marked: 95,100")
    args = parser.parse_args()
    rows, _, _ = metrics_rows(args.workdir / "metrics.jsonl")
    draw(rows, [int(step) for step in args.resumed.split(",") if step], args.picture)
    for name, value in summary(rows, args.workdir).items():
        print(f"{name:<20} {value}")


if __name__ == "__main__":
    main()
