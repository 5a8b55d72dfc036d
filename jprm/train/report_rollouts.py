"""samples/*.jsonl -> the rollouts that report.html embeds: a bounded choice, evenly over iterations, and what was left out."""

import json
from pathlib import Path
from typing import Any

from jprm.train.report_curves import finite, read_jsonl

MAX_ROLLOUTS = 1000
MAX_TOKENS = 2048  # of one response
MAX_BYTES = 8_000_000  # of all embedded rollouts, as JSON


def shares(counts: list[int], most: int) -> list[int]:
    """Divides `most` over bins as evenly as their sizes allow; with more bins than `most`, evenly spaced bins get one each.

    Example:
      >>> shares([10, 2, 10], 12)
      [5, 2, 5]
    """
    n = len(counts)
    if n > most:
        chosen = {round(i * (n - 1) / max(most - 1, 1)) for i in range(most)}
        return [min(1, count) if i in chosen else 0 for i, count in enumerate(counts)]
    out, left = [0] * n, most
    for place, i in enumerate(sorted(range(n), key=counts.__getitem__)):  # smallest first: what it leaves goes to the others
        out[i] = min(counts[i], left // (n - place))
        left -= out[i]
    return out


def _count_lines(path: Path) -> int:
    with open(path, "rb") as lines:
        return sum(1 for line in lines if line.strip())


def _numbers(values: Any, length: int, digits: int = 4) -> list[float | None] | None:
    """Exactly `length` numbers, None where there is none; None instead of the list where the row has no such column."""
    if not isinstance(values, list):
        return None
    clean = [finite(value) for value in values[:length]]
    return [None if v is None else float(f"{v:.{digits}g}") for v in clean] + [None] * (length - len(clean))


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    if isinstance(value, list):  # chat messages
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" if isinstance(m, dict) else str(m) for m in value)
    return "" if value is None else str(value)


def verdict(row: dict) -> str:
    """``correct | wrong | unknown | filler``: what the filter of the page offers. Half or more of the outcome is correct.

    A row with a verdict has it whether or not the policy learnt from it (`valid`): groups that are all right teach nothing.
    """
    outcome = finite(row.get("outcome"))
    if outcome is None or row.get("known") is False:
        return "filler" if row.get("valid") is False else "unknown"
    return "correct" if outcome >= 0.5 else "wrong"


def embedded(row: dict) -> dict:
    """The part of one samples/ row that the page shows, bounded and free of NaN."""
    response = _text(row.get("response"))
    tokens = row.get("tokens")
    tokens = [str(token) for token in tokens] if isinstance(tokens, list) else [response]
    n = min(len(tokens), MAX_TOKENS)
    steps = row.get("step_of_token") if isinstance(row.get("step_of_token"), list) else []
    scores = row.get("step_scores")
    out = {
        "row": row.get("row"),
        "prompt_id": row.get("prompt_id"),
        "prompt": _text(row.get("prompt"))[:20_000],
        "answer": _text(row.get("answer"))[:2_000],
        "verdict": verdict(row),
        "outcome": finite(row.get("outcome")),
        "stop": _text(row.get("stop")),
        "tokens": tokens[:n],
        "cut": len(tokens) - n,
        "steps": [-1 if (s := _integer(step)) is None else s for step in [*steps[:n], *[None] * (n - len(steps))]],
        "rewards": _numbers(row.get("token_rewards"), n),
        "returns": _numbers(row.get("returns"), n),
        "advantages": _numbers(row.get("advantages"), n),
        "scores": _numbers(scores, len(scores)) if isinstance(scores, list) else None,
        "first_error": _integer(row.get("first_error")),
    }
    return {key: value for key, value in out.items() if value is not None}


def _iterations(files: list[tuple[Path, int]], most: int) -> tuple[list[dict], int]:
    """Reads the chosen files. An iteration of the page is one (step, phase); it keeps its first rows, so groups stay whole."""
    out, bad = [], 0
    for (path, _), share in zip(files, shares([count for _, count in files], most)):
        if not share:
            continue
        rows, unreadable = read_jsonl(path)
        bad += unreadable
        by_phase: dict[str, list[dict]] = {}
        for row in rows:
            by_phase.setdefault(str(row.get("phase", "")), []).append(row)
        sizes = [len(group) for group in by_phase.values()]
        for (phase, group), kept in zip(by_phase.items(), shares(sizes, share)):
            if kept:
                step = _integer(group[0].get("step"))
                verdicts = [verdict(row) for row in group]
                out.append(
                    {
                        "step": step if step is not None else path.stem,
                        "phase": phase,
                        "total": len(group),
                        "counts": {name: verdicts.count(name) for name in ("correct", "wrong", "unknown", "filler")},
                        "rows": [embedded(row) for row in group[:kept]],
                    }
                )
    return out, bad


def read_rollouts(folder: Path, most: int = MAX_ROLLOUTS, most_bytes: int = MAX_BYTES) -> dict:
    """Chooses at most `most` rollouts, at most `most_bytes` of JSON, evenly over the iterations in `folder`.

    Returns:
      ``{"total", "embedded", "unreadable", "iterations": [{"step", "phase", "total", "counts", "rows"}]}``; counts are over
      all rows of the iteration, embedded or not.
    """
    files = [(path, _count_lines(path)) for path in sorted(folder.glob("*.jsonl"))] if folder.is_dir() else []
    files = [(path, count) for path, count in files if count]
    total = sum(count for _, count in files)
    most = min(most, total)
    while True:
        iterations, bad = _iterations(files, most)
        size = len(json.dumps(iterations))
        if size <= most_bytes or most <= 1:
            break
        most = max(1, min(most - 1, int(most * 0.95 * most_bytes / size)))
    return {"total": total, "embedded": sum(len(it["rows"]) for it in iterations), "unreadable": bad, "iterations": iterations}
