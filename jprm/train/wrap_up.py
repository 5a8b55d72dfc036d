"""What a finished run leaves for people: the exported models, a summary, a report."""

import json
import logging
from typing import Any

import jax

from jprm.model.hf_config import read_hf_config
from jprm.model.hf_export import export_model
from jprm.model.spec import Params
from jprm.train.metrics import METRICS, read_metrics
from jprm.train.report import write_report
from jprm.train.setup import Run
from jprm.train.state import TrainState

log = logging.getLogger(__name__)
BEFORE_AND_AFTER = ("accuracy", "greedy")


def wrap_up(run: Run, state: TrainState) -> None:
    """Exports where the config asks for it; writes summary.json and report.html; prints the table."""
    if run.config.export.at_end:
        for role, params in roles(run, state).items():
            target = run.workdir / "export" / role
            if not target.exists():  # a finished run that is started again has nothing to do
                export_role(run, role, params, target)
    if jax.process_index() == 0:
        summary = summarise(run)
        (run.workdir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        page = write_report(run.workdir)
        print(table(summary))
        print(f"report: {page}")


def roles(run: Run, state: TrainState) -> dict[str, Params]:
    """What a finished run gives away: trained roles by name, and the PRM's reference where it is no model that the user has."""
    trained = {name: learner.params for name, learner in (("policy", state.policy), ("prm", state.prm)) if learner is not None}
    own = not run.config.model.path or run.config.sft.steps > 0
    return trained | ({"reference": state.reference} if state.prm is not None and own else {})


def export_role(run: Run, role: str, params: Params, target: Any) -> Any:
    """Writes one role in Hugging Face form; a PRM says with which beta, reference and step rule it scores."""
    config, path = run.config, run.config.model.path
    dtype = config.export.dtype if config.export.dtype != "auto" else ("bfloat16" if path else "float32")
    extra = None
    if role == "prm":
        p = config.prm
        reference = path if path and not config.sft.steps else "../reference (the policy after its warm start)"
        extra = {
            "kind": "implicit_prm",
            "beta": p.beta,
            "score_scale": p.score_scale,
            "reference": reference,
            "separator": config.task.separator or run.task.separator,
            "max_steps": p.max_steps,
        }
    source = read_hf_config(path) if path else None
    return export_model(
        params, run.cfg, target, run.tokenizer, stop_ids=run.stop_ids, source_config=source, dtype=dtype, extra=extra
    )


def summarise(run: Run) -> dict[str, float]:
    """The run in a dozen numbers, from its own metrics: evaluation before RL and at the end, and how long it all took."""
    rows = read_metrics(run.workdir / METRICS)
    thorough = [r for r in rows if r["phase"] == "eval" and "eval/greedy" in r]
    out: dict[str, float] = {}
    if thorough:
        first, last = thorough[0], thorough[-1]
        k = run.config.eval.pass_k
        pairs = (*BEFORE_AND_AFTER, *([f"pass_at_{k}"] if k else []))
        for name in pairs:
            if last is not first:
                out[f"{name}_before"] = first[f"eval/{name}"]
            out[f"{name}_after"] = last[f"eval/{name}"]
        out |= {
            key.removeprefix("eval/"): value
            for key, value in last.items()
            if key.startswith("eval/") and key.removeprefix("eval/") not in (*pairs, "accuracy_stderr", "problems", "unknown")
        }
    out["iterations"] = max((r["step"] for r in rows), default=0)
    out["seconds"] = round(rows[-1]["time_s"], 1) if rows else 0.0
    return out


def table(summary: dict[str, Any]) -> str:
    """The summary as aligned lines."""
    width = max(map(len, summary), default=0)
    show = lambda v: "-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v)  # None: a number that was not finite
    lines = [f"  {name:<{width}}  {show(value):>9}" for name, value in summary.items()]
    return "\n".join(["", *lines, ""])
