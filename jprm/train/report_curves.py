"""metrics.jsonl -> the curves and phase times of report.html: read, bounded, grouped into panels. Numbers only, no HTML."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PHASES = ("sft", "prm", "rl")
MAX_POINTS = 1000  # per series: more than a small multiple has pixels
MAX_BARS = 120

# (group, prefixes that belong to it, panels with a title and keys of their own). A key that no panel names gets one alone.
# A third entry of a panel is a reference line: its value and what it means.
GROUPS: tuple[tuple[str, tuple[str, ...], tuple[tuple, ...]], ...] = (
    (
        "Outcome",
        ("critic", "eval"),
        (
            ("Accuracy", ("critic/score/mean", "eval/accuracy", "eval/greedy")),
            ("Pass@k", ("eval/pass_at_8", "eval/pass_at_4", "eval/pass_at_2")),
        ),
    ),
    (
        "Process reward model",
        ("prm",),
        (
            ("AUC", ("prm/auc",), (0.5, "chance")),
            ("Pair accuracy", ("prm/pair_accuracy",), (0.5, "chance")),
            ("Loss", ("prm/loss",)),
            ("Gradient norm", ("prm/grad_norm",)),
        ),
    ),
    (
        "Policy",
        ("actor",),
        (
            ("Loss", ("actor/loss",)),
            ("Entropy (nats)", ("actor/entropy",)),
            ("KL to reference (nats)", ("actor/kl",)),
            ("Clip fraction", ("actor/clip_fraction",)),
            ("Gradient norm", ("actor/grad_norm",)),
        ),
    ),
    (
        "Responses",
        ("response_length", "response", "prompt_length"),
        (("Length (tokens)", ("response_length/mean", "response_length/max")),),
    ),
    (
        "Supervised warm start",
        ("sft",),
        (
            ("Loss", ("sft/loss",)),
            ("Gradient norm", ("sft/grad_norm",)),
        ),
    ),
)
PARTS = ("gen", "verify", "step")  # the phases of one iteration; other timing_s/ names follow them
NAMES = {"lr": "Learning rate", "grad_norm": "Gradient norm", "auc": "AUC", "kl": "KL"}


def finite(value: Any) -> float | None:
    """A number to 6 significant digits, or None for whatever is not a finite number: the page draws None as a gap."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def read_jsonl(path: Path) -> tuple[list[dict], int]:
    """Returns the objects of a JSON-lines file and how many lines were not one (a killed run may leave half a line)."""
    rows, bad = [], 0
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                bad += 1
    return rows, bad


def metrics_rows(path: Path) -> tuple[list[dict], list[int], int]:
    """Reads metrics.jsonl.

    A run that was resumed may have written the same step twice: the later line counts, key by key.

    Returns:
      rows in order of step (one per step and phase), the steps at which the run was resumed, unreadable lines.
    """
    lines, bad = read_jsonl(path)
    merged: dict[tuple[str, int], dict] = {}
    resumed, last_step, last_time = [], -1, 0.0
    for line in lines:
        step, phase = line.get("step"), str(line.get("phase", ""))
        if isinstance(step, bool) or not isinstance(step, int):
            bad += 1
            continue
        seconds = finite(line.get("time_s")) or last_time
        if step < last_step or seconds < last_time:
            resumed.append(step)
        last_step, last_time = step, seconds
        merged.setdefault((phase, step), {}).update(line)
    return sorted(merged.values(), key=lambda row: row["step"]), sorted(set(resumed)), bad


def phase_spans(rows: Iterable[dict]) -> list[dict]:
    """Where each phase lies on the step axis: ``[{"name", "start", "end", "count"}]``, in the order of the run."""
    spans: dict[str, dict] = {}
    for row in rows:
        name = row.get("phase")
        if name in PHASES:
            span = spans.setdefault(name, {"name": name, "start": row["step"], "end": row["step"], "count": 0})
            span["end"], span["count"] = row["step"], span["count"] + 1
    return sorted(spans.values(), key=lambda span: span["start"])


def thin(x: list[int], y: list[float | None], most: int = MAX_POINTS) -> tuple[list[int], list[float | None]]:
    """At most `most` of the points: the lowest and the highest of every bucket, so that no spike is lost; an empty one a gap."""
    if len(x) <= most:
        return x, y
    size = math.ceil(len(x) / (most // 2))
    keep: set[int] = set()
    for start in range(0, len(x), size):
        here = range(start, min(start + size, len(x)))
        values = [i for i in here if y[i] is not None]
        keep |= {min(values, key=y.__getitem__), max(values, key=y.__getitem__)} if values else {here[0]}
    chosen = sorted(keep)
    return [x[i] for i in chosen], [y[i] for i in chosen]


def series_of(rows: list[dict]) -> dict[str, dict]:
    """Every ``group/name`` key with at least one finite value: ``{key: {"x": [step], "y": [value or None]}}``."""
    series: dict[str, dict] = {}
    for row in rows:
        for key, value in row.items():
            if "/" in key and not key.startswith("timing_s/"):
                one = series.setdefault(key, {"x": [], "y": []})
                one["x"].append(row["step"])
                one["y"].append(finite(value))
    kept = {}
    for key, one in series.items():
        if any(value is not None for value in one["y"]):
            x, y = thin(one["x"], one["y"])
            kept[key] = {"x": x, "y": y}
    return kept


def flat(series: dict[str, dict]) -> dict[str, str]:
    """Series that a curve would say nothing about, ``{key: what to say instead}``: one value throughout, or one or two
    evaluations.

    Panels that a table names are drawn whatever they hold: their absence would be missed.
    """
    named = {key for _, _, panels in GROUPS for _, keys, *_ in panels for key in keys}
    said = {}
    for key, one in series.items():
        values = [y for y in one["y"] if y is not None]
        if key in named:
            continue
        if len(set(values)) == 1 and len(values) > 1:
            said[key] = f"{key} {values[0]:g}"
        elif key.startswith("eval/") and len(values) <= 2:
            said[key] = f"{key} " + " \u2192 ".join(f"{v:g}" for v in values)
    return said


def panels_of(keys: Iterable[str]) -> list[dict]:
    """Sorts keys into titled groups of titled panels; nothing is left out, and a group or panel without a key is not there."""
    left = list(keys)
    groups = []

    def take(wanted: Iterable[str]) -> list[str]:
        found = [key for key in wanted if key in left]
        for key in found:
            left.remove(key)
        return found

    def alone(group_keys: list[str]) -> list[dict]:
        return [{"title": title(key), "keys": take([key])} for key in group_keys]

    for name, prefixes, panels in GROUPS:
        made = []
        for panel_title, wanted, *reference in panels:
            found = take(wanted)
            if found:
                made.append({"title": panel_title, "keys": found})
                if reference:
                    made[-1]["reference"] = reference[0]
        made += alone(sorted(key for key in left if key.split("/")[0] in prefixes))
        if made:
            groups.append({"title": name, "panels": made})
    for prefix in sorted({key.split("/")[0] for key in left}):
        made = alone(sorted(key for key in left if key.split("/")[0] == prefix))
        groups.append({"title": prefix.replace("_", " "), "panels": made})
    return groups


def title(key: str) -> str:
    """``critic/score/max`` -> ``Score max``: what a panel is called that no table names."""
    words = key.split("/", 1)[1]
    return NAMES.get(words, words.replace("/", " ").replace("_", " ").capitalize())


def phase_times(rows: list[dict]) -> list[dict]:
    """Where the seconds went, per phase of the run.

    Returns:
      ``[{"phase", "count", "parts": [name], "totals": [s], "bars": [[first step, last step, s per part ...]]}]``.
      "other" is what ``timing_s/iteration`` holds beyond its parts; totals are over all iterations; a bar is a mean of its own.
    """
    out = []
    for phase in PHASES:
        timed = []
        for row in rows:
            if row.get("phase") == phase:
                seconds = {key[9:]: finite(value) for key, value in row.items() if key.startswith("timing_s/")}
                seconds = {name: value for name, value in seconds.items() if value is not None}
                if seconds:
                    whole = seconds.pop("iteration", None)
                    if whole is not None:
                        seconds["other"] = max(0.0, whole - sum(seconds.values()))
                    timed.append((row["step"], seconds))
        if not timed:
            continue
        names = {name for _, seconds in timed for name in seconds}
        parts = [n for n in PARTS if n in names] + sorted(names - {*PARTS, "other"}) + ["other"] * ("other" in names)
        size = math.ceil(len(timed) / MAX_BARS)
        bars = []
        for start in range(0, len(timed), size):
            block = timed[start : start + size]
            means = [finite(sum(seconds.get(n, 0.0) for _, seconds in block) / len(block)) for n in parts]
            bars.append([block[0][0], block[-1][0], *means])
        totals = [finite(sum(seconds.get(n, 0.0) for _, seconds in timed)) for n in parts]
        out.append({"phase": phase, "count": len(timed), "parts": parts, "totals": totals, "bars": bars})
    return out
