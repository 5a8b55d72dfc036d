"""report.html: one run in one file that opens offline: curves, phase times, and rollouts coloured by process reward.

The page is data plus a script. Everything that a run wrote (prompts, responses, config values) travels as JSON in an inert
``<script type="application/json">`` and reaches the page through text nodes only; a content-security policy allows the
one script by its hash and no network at all.
"""

import base64
import hashlib
import html
import json
import os
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from jprm.errors import UserError
from jprm.train import report_curves as curves
from jprm.train.report_rollouts import MAX_ROLLOUTS, read_rollouts

SCRIPTS = ("report_template.js", "report_curves.js", "report_rollouts.js")
LABELS = {
    "accuracy": "Sampled accuracy",
    "greedy": "Greedy accuracy",
    "prm_first_error_f1": "PRM first-error F1",
    "majority_at_8": "Majority of 8",
    "prm_best_of_8": "PRM best of 8",
    "prm_auc": "PRM AUC",
    "stopped": "Responses that ended",
    "seconds": "Wall time",
}
# What the header shows of the config where it is there; the whole config is further down the page.
HIGHLIGHTS = (
    ("Model", "model.path"),
    ("Layers", "model.num_layers"),
    ("Width", "model.hidden_size"),
    ("Task", "task.name"),
    ("Prompts", "rl.prompts"),
    ("Samples per prompt", "rl.group"),
    ("Outcome baseline", "rl.estimator"),
    ("Process weight", "rl.process_weight"),
    ("Process formula", "rl.formula"),
    ("Process granularity", "rl.granularity"),
    ("PRM beta", "prm.beta"),
    ("Policy learning rate", "rl.optimizer.lr"),
    ("PRM learning rate", "prm.optimizer.lr"),
    ("KL coefficient", "rl.kl_coef"),
    ("Seed", "seed"),
)


def write_report(workdir: str | os.PathLike, *, max_rollouts: int = MAX_ROLLOUTS) -> Path:
    """Writes ``<workdir>/report.html`` from config.json, metrics.jsonl, samples/ and summary.json, each only if it is there.

    Args:
      workdir: directory of the run. It may still be running: the page is replaced in one rename.
      max_rollouts: most rollouts to embed; the page says how many were left out.

    Returns:
      Path of the page.

    Raises:
      UserError: `workdir` is not a directory.
    """
    workdir = Path(workdir)
    if not workdir.is_dir():
        raise UserError(
            f"no directory {str(workdir)!r}",
            expected="the workdir of a run",
            where="workdir",
            fix="Give the directory that holds metrics.jsonl",
        )
    page = render(collect(workdir, max_rollouts))
    out, partial = workdir / "report.html", workdir / f".report.html.{os.getpid()}"
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return out


def collect(workdir: Path, max_rollouts: int = MAX_ROLLOUTS) -> dict:
    """Everything the page shows, as plain JSON values (no NaN)."""
    notes: list[str] = []
    config = flatten(_read_object(workdir / "config.json", notes))
    summary = _read_object(workdir / "summary.json", notes)
    rows, resumed, bad = [], [], 0
    if (workdir / "metrics.jsonl").is_file():
        rows, resumed, bad = curves.metrics_rows(workdir / "metrics.jsonl")
    if bad:
        notes.append(f"metrics.jsonl: {bad:,} {'line' if bad == 1 else 'lines'} could not be read.")
    rollouts = read_rollouts(workdir / "samples", max_rollouts)
    if rollouts["unreadable"]:
        notes.append(f"samples/: {rollouts['unreadable']:,} of the lines read could not be parsed.")
    series = curves.series_of(rows)
    flat = curves.flat(series)
    return {
        "name": workdir.resolve().name,
        "phases": curves.phase_spans(rows),
        "resumed": resumed,
        "evals": sorted({row["step"] for row in rows if row.get("phase") == "eval"}),
        "highlights": highlights(dict(config)),
        "config": config,
        "headline": headline(summary),
        "groups": curves.panels_of(key for key in series if key not in flat),
        "flat": sorted(flat.values()),
        "series": series,
        "times": curves.phase_times(rows),
        "rollouts": rollouts,
        "notes": notes,
    }


def render(data: dict) -> str:
    """Fills the template. Pure: the same data give the same page."""
    read = resources.files("jprm.train").joinpath
    script = "\n".join(read(name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\nstart();\n}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # JSON inside <script>: with these three spelled as escapes no value can end the element or open a comment in it.
    # Half a surrogate pair, which no UTF-8 file can hold, becomes U+FFFD.
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return Template(read("report_template.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(data["name"]),
        digest=digest,
        data=text,
        script=script,
        notice=notice(data),
        style=read("report_template.css").read_text(encoding="utf-8"),
    )


def notice(data: dict) -> str:
    """What an empty run's page says; empty for any other."""
    if data["series"] or data["times"] or data["rollouts"]["embedded"]:
        return ""
    return (
        '<p class="empty"><strong>Nothing recorded yet.</strong> This run has written no metrics and no rollouts: '
        "metrics.jsonl and samples/ are absent or empty. Write the report again after the first iteration.</p>"
    )


def _read_object(path: Path, notes: list[str]) -> dict:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(f"{path.name} could not be read: {error}.")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds a {type(value).__name__}, not an object, and is not shown.")
        return {}
    return value


def flatten(config: dict, prefix: str = "") -> list[tuple[str, str]]:
    """``{"rl": {"lr": 1e-4}}`` -> ``[("rl.lr", "0.0001")]``, in the order of the file."""
    out: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            out += flatten(value, f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return out


def highlights(config: dict[str, str]) -> list[tuple[str, str]]:
    """The few settings a reader asks for first: label and value; absent or empty ones, and RL's in a run without RL, left out."""
    no_rl = config.get("rl.iterations") == "0"
    shown = [(name, key) for name, key in HIGHLIGHTS if not (no_rl and key.startswith("rl."))]
    return [(name, config[key]) for name, key in shown if config.get(key) not in (None, "", "null")]


def headline(summary: dict[str, Any]) -> list[dict]:
    """Rows of the headline table: ``{"label", "before", "after", "change", "from", "to", "against"}``, text ready to show.

    ``x_before`` and ``x_after`` share a row, ``x_chance`` stands as the "before" of ``x``. Shares in [0, 1] are shown as percent,
    and `from` and `to` place them on a line from 0 to 1.
    """
    values = {key: number for key, value in summary.items() if (number := curves.finite(value)) is not None}
    out, seen = [], set()
    for key in values:
        stem = next((key.removesuffix(end) for end in ("_before", "_after", "_chance") if key.endswith(end)), key)
        if stem in seen:
            continue
        seen.add(stem)
        after = values.get(f"{stem}_after", values.get(stem))
        base = values.get(f"{stem}_before", values.get(f"{stem}_chance"))
        present = [value for value in (base, after) if value is not None]
        row = {"label": label(stem), "against": "chance" if f"{stem}_chance" in values else "before"}
        if stem.endswith("seconds"):
            show = duration
        elif any(word in stem for word in ("accuracy", "greedy", "pass_at", "majority", "best_of", "f1", "stopped")):
            scale = 1.0 if max(present) > 1 else 100.0  # F1 is often given on 0 to 100 already
            show = lambda value, scale=scale: f"{value * scale:.1f} %"
            row["from"], row["to"] = (None if v is None else v * scale / 100 for v in (base, after))
            if base is not None and after is not None:
                row["change"] = f"{(after - base) * scale:+.1f}".replace("-", "\u2212")
        else:
            show = number_text
            if base is not None and after is not None:
                row["change"] = f"{after - base:+.4g}".replace("-", "\u2212")
        row["before"], row["after"] = (None if v is None else show(v) for v in (base, after))
        out.append(row)
    return sorted(out, key=lambda row: row.get("to") is None and row.get("from") is None)


def label(stem: str) -> str:
    words = stem.replace("pass_at_", "pass@").replace("_", " ").replace("prm ", "PRM ")
    return LABELS.get(stem, words[:1].upper() + words[1:])


def number_text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """``3725`` -> ``1 h 02 min``; two units are all a reader wants."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
