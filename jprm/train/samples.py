"""`samples/`: rollouts for people to read, one JSON object a line; report.html shows them."""

import json
import os
from typing import Any

import jax
import numpy as np

from jprm.rl.rollouts import Rollouts
from jprm.tasks.task import Problem
from jprm.train.evaluation import Scored
from jprm.train.phases import Iteration
from jprm.train.prompts import responses
from jprm.train.rollout import fetch
from jprm.train.setup import Run
from jprm.train.state import Phase


def write_samples(run: Run, phase: Phase, done: Iteration) -> None:
    """Writes the first ``log.samples_rows`` rollouts of every ``log.samples_every``-th RL iteration, rewards and advantages with
    them; where more prompts are sampled than kept, the first of those kept."""
    g, trace = run.config.log, done.trace
    if trace is None or not g.samples_every or (done.step - phase.start - 1) % g.samples_every:
        return
    n = min(g.samples_rows, trace.advantages.shape[0])
    rows: Rollouts = trace.rollouts
    arrays = {k: fetch(getattr(rows, k))[:n] for k in ("tokens", "lengths", "step", "outcome", "known", "valid")}
    arrays |= {k: fetch(getattr(trace, k))[:n] for k in ("token_rewards", "process_returns", "advantages")}
    arrays |= {k: fetch(rows.columns[k])[:n] for k in ("stopped", "prompt")}
    texts, *_ = responses(run, arrays["tokens"], np.zeros(n, int), arrays["lengths"])
    problems = [done.prompts.problems[p] for p in arrays["prompt"]]
    _write(run, done.step, "rl", [_row(run, done.step, "rl", r, problems[r], texts[r], arrays) for r in range(n)])


def write_eval_samples(run: Run, step: int, scored: Scored) -> None:
    """Writes the first ``log.samples_rows`` rollouts of an evaluation."""
    n = min(run.config.log.samples_rows, len(scored.texts))
    if not n:
        return
    whole = scored.rollouts
    start = whole["prompt_lengths"][:n, None] + np.arange(run.config.sampling.max_new)
    cut = lambda x: np.take_along_axis(x[:n], np.minimum(start, x.shape[1] - 1), axis=1)
    arrays = {
        "tokens": cut(whole["tokens"]),
        "step": cut(whole["step"]),
        "lengths": (whole["lengths"] - whole["prompt_lengths"])[:n],
        "outcome": scored.outcome[:n],
        "known": scored.known[:n],
        "valid": np.ones(n, bool),
        "stopped": whole["stopped"][:n],
    }
    if scored.token_rewards is not None:
        arrays["token_rewards"] = scored.token_rewards[:n]
    problems = [scored.problems[r // scored.group] for r in range(n)]
    _write(run, step, "eval", [_row(run, step, "eval", r, problems[r], scored.texts[r], arrays) for r in range(n)])


def _row(run: Run, step: int, phase: str, r: int, problem: Problem, text: str, a: dict[str, np.ndarray]) -> dict[str, Any]:
    n = int(a["lengths"][r])
    floats = lambda x: [round(float(v), 6) if np.isfinite(v) else None for v in x[r][:n]]
    steps = a["step"][r][:n].tolist()
    cut = text != run.builder.decode_response(a["tokens"][r][:n], run.stop_ids)  # by a stop string, before what follows it
    row = {
        "step": step,
        "phase": phase,
        "row": r,
        "prompt_id": problem.index,
        "prompt": _text(problem.prompt),
        "response": text,
        "tokens": [run.tokenizer.decode([i]) for i in a["tokens"][r][:n]],
        "outcome": float(a["outcome"][r]) if a["known"][r] else None,
        "known": bool(a["known"][r]),
        "valid": bool(a["valid"][r]),
        "answer": problem.answer,
        "step_of_token": steps,
        "first_error": run.task.first_error(problem, text),
        "stop": "string" if cut else "eos" if a["stopped"][r] else "length",
    }
    if "token_rewards" in a:
        row["token_rewards"] = floats(a["token_rewards"])
        row["step_scores"] = [
            round(sum(x or 0.0 for x, s in zip(row["token_rewards"], steps) if s == k), 6)
            for k in range(max(steps, default=-1) + 1)
        ]
    if "advantages" in a:
        row |= {"advantages": floats(a["advantages"]), "returns": floats(a["process_returns"])}
    return row


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def _write(run: Run, step: int, phase: str, rows: list[dict[str, Any]]) -> None:
    if jax.process_index() == 0:
        folder = run.workdir / "samples"
        folder.mkdir(exist_ok=True)
        name = f"{step:06d}.jsonl" if phase == "rl" else f"{step:06d}_{phase}.jsonl"
        # In one go: `jprm evaluate` beside a run in progress may write the same evaluation, and the report reads at any time.
        new = folder / f"{name}.{os.getpid()}.new"
        new.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        os.replace(new, folder / name)
