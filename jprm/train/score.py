"""`jprm score`: what an implicit PRM says of given solutions, step by step.

The PRM is the run's own with the reference of its checkpoint. Where the workdir has no checkpoint, ``config.prm.path`` names the
PRM and ``config.model.path`` its reference, both in Hugging Face form, such as `jprm export` writes:

    jprm score --config=RECIPE --workdir=NEW model.path=REFERENCE prm.path=PRM --rows=FILE --out=FILE
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jprm.data.records import Account
from jprm.data.schemas import Solution, read_solutions
from jprm.errors import UserError
from jprm.evals.first_error import predict
from jprm.reward import implicit
from jprm.reward.scores import aggregate, step_scores
from jprm.rl.rollouts import window
from jprm.rl.step import Batch, response_logps
from jprm.sharding.rules import sharding
from jprm.train.metrics import METRICS, read_metrics
from jprm.train.output import check_new, json_lines
from jprm.train.progress import Progress
from jprm.train.prompts import response_steps
from jprm.train.restore import restore_roles
from jprm.train.rollout import fetch
from jprm.train.setup import Run, build
from jprm.train.state import TrainState

RECORDED = {"beta": "prm.beta", "score_scale": "prm.score_scale", "separator": "task.separator"}  # of jprm.json -> config key


class Encoded(NamedTuple):
    """One solution as ids: prompt, response with its end, and the step of every response token."""

    row: int
    prompt: np.ndarray
    response: np.ndarray
    step: np.ndarray


def run(config: Any, rows: str, out: str, step: int | None = None, tokens: bool = False, threshold: float | None = None) -> int:
    """Scores every usable row of ``rows`` and writes one JSON line each to ``out``, in order:

        {"row": 0, "outcome": 1.9, "score": -0.2, "steps": ["3+4=7;", "#7"], "single": [2.1, -0.2],
         "accumulative": [2.1, 1.9], "first_error": 1}

    ``row`` counts the file's rows from 0, those that were left out included. ``outcome`` is beta x the sum of log-ratios,
    ``score`` the one of ``eval.prm_score``; ``first_error`` is the first step whose ``eval.first_error_score`` is below the
    threshold (-1: none; null: no threshold is known). Steps beyond ``prm.max_steps`` are scored one by one, never merged.

    Args:
      config: of the run. A row fits ``sampling.max_prompt`` and ``sampling.max_new``: scores are computed at training's shapes.
      rows: .jsonl, .json or .parquet: a prompt with a response, or with ``steps``, a list of texts. Steps are encoded one by
        one and joined as ids, each but the last with the task's separator after it (unless it ends with it): borders are exact.
      out: a new file.
      step: the checkpoint's number; None: the newest.
      tokens: also write every token with its reward.
      threshold: None: the one that the run's evaluation of that step found.

    Raises:
      UserError: ``out`` is taken, no PRM or no reference, a scale other than the one recorded with the weights, no usable row,
        a threshold that is not finite.
    """
    target = check_new(out)
    if threshold is not None and not np.isfinite(threshold):
        raise UserError(f"{threshold}", expected="a finite number", where="--threshold", fix="Leave it out, or give a step score")
    check_recorded(config)
    the_run = build(config)
    try:
        solutions = usable(the_run, rows)
        with jax.set_mesh(the_run.mesh), json_lines(target) as write:
            state, source = restore_roles(the_run, ("prm", "reference"), step=step)
            if threshold is None:
                threshold = logged_threshold(the_run, int(state.step))
            for row in score_all(the_run, state, solutions, threshold, tokens):
                write(row)
    finally:
        the_run.task.close()
    if jax.process_index() == 0:
        limit = "no threshold: first_error is null" if threshold is None else f"first errors below {threshold:.4g}"
        print(f"{source}: {len(solutions)} solutions scored, {limit}: {target}")
    return 0


def check_recorded(config: Any) -> None:
    """A PRM that `jprm export` wrote says how it scores; the config has to agree.

    Raises:
      UserError: names the first key that does not.
    """
    record = pathlib.Path(config.prm.path or ".") / "jprm.json"
    if not config.prm.path or not record.is_file():
        return
    stored = json.loads(record.read_text())
    for name, key in RECORDED.items():
        group, field = key.split(".")
        mine = config[group][field]
        if name in stored and stored[name] != mine and (mine or name != "separator"):  # an empty separator is the task's own
            raise UserError(
                f"{key} = {mine!r}",
                expected=f"{stored[name]!r}, with which {record} says these weights score",
                where=f"config.{key}",
                fix=f"Set config.{key}={stored[name]!r}",
            )


def usable(run: Run, path: str) -> list[Encoded]:
    """The solutions that fit, as ids; the others are counted by reason.

    Raises:
      UserError: the file cannot be read, or no row is left.
    """
    account, s, kept = Account("solutions"), run.config.sampling, []
    for row, solution in read_solutions(path, account):
        one = encode_solution(run, row, solution)
        for length, limit, key in ((len(one.prompt), s.max_prompt, "max_prompt"), (len(one.response), s.max_new, "max_new")):
            if not 0 < length <= limit:
                account.rows_out -= 1
                account.drop(
                    f"with a {'prompt' if key == 'max_prompt' else 'response'} beyond config.sampling.{key} = {limit} tokens",
                    f"row {row}",
                )
                break
        else:
            kept.append(one)
    account.close(path)
    if jax.process_index() == 0:
        print(account)
    return kept


def encode_solution(run: Run, row: int, solution: Solution) -> Encoded:
    """Ids and the step of each. A response that is one text has its borders where the separator's ids are, as in training."""
    prompt = np.array(run.builder.prompt_ids(solution.prompt), np.int32)
    if not solution.steps:
        response = np.array(run.builder.response_ids(solution.response), np.int32)
        return Encoded(row, prompt, response, response_steps(run, response))
    separator = run.config.task.separator or run.task.separator
    texts = [t if i == len(solution.steps) - 1 or t.endswith(separator) else t + separator for i, t in enumerate(solution.steps)]
    pieces = [run.builder.response_ids(t) for t in texts]
    pieces = [p[:-1] for p in pieces[:-1]] + pieces[-1:]  # one end, that of the whole response
    return Encoded(
        row,
        prompt,
        np.array(sum(pieces, []), np.int32),
        np.repeat(np.arange(len(pieces)), [len(p) for p in pieces]).astype(np.int32),
    )


def logged_threshold(run: Run, step: int) -> float | None:
    """``prm_threshold`` of the run's own evaluation at a step, or of `jprm evaluate` where training did not evaluate there."""
    for row in reversed(read_metrics(run.workdir / METRICS)):
        if row["phase"] == "eval" and row["step"] == step and row.get("eval/prm_threshold") is not None:
            return row["eval/prm_threshold"]
    written = run.workdir / f"evaluation_{step:06d}.json"
    return json.loads(written.read_text())["metrics"].get("eval/prm_threshold") if written.is_file() else None


def make_scorer(run: Run, steps: int) -> Any:
    """The compiled scorer: (prm, reference, tokens i32[B, T], prompt lengths i32[B], step i32[B, N]) -> arrays [B, …]."""
    p, e, N = run.config.prm, run.config.eval, run.config.sampling.max_new
    scale = p.beta * p.score_scale

    def score(prm, reference, tokens, prompt_lengths, step):
        mask = step >= 0
        batch = Batch(tokens, prompt_lengths, window(tokens, prompt_lengths, N), mask)
        q = implicit.log_ratio(response_logps(prm, run.cfg, batch)[0], response_logps(reference, run.cfg, batch)[0], mask)
        scores = {kind: step_scores(q, mask, step, steps, scale, kind) for kind in ("single", "accumulative")}
        kind, how = e.prm_score.split("_")
        return {
            "outcome": implicit.outcome_rewards(q, mask, scale),
            "score": aggregate(*scores[kind], how),
            "tokens": implicit.token_rewards(q, mask, scale),
            "exists": scores["single"][1],
        } | {kind: s for kind, (s, _) in scores.items()}

    return jax.jit(score)


def score_all(
    run: Run, state: TrainState, solutions: list[Encoded], threshold: float | None, with_tokens: bool
) -> Iterator[dict[str, Any]]:
    """Yields the output rows, batch by batch."""
    n, T, N = len(solutions), run.length, run.config.sampling.max_new
    size = -(-min(run.config.eval.batch, n) // run.row_shards) * run.row_shards  # one shape; a short last batch is filled up
    score = make_scorer(run, max(int(s.step[-1]) + 1 for s in solutions))
    place = sharding(run.mesh, ("rows",))
    with Progress(interval_s=run.config.log.every_s) as progress:
        progress.start("score", n)
        for start in range(0, n, size):
            chosen = [solutions[(start + i) % n] for i in range(size)]
            tokens, step = np.zeros((size, T), np.int32), np.full((size, N), -1, np.int32)
            for i, s in enumerate(chosen):
                tokens[i, : len(s.prompt) + len(s.response)] = np.concatenate([s.prompt, s.response])
                step[i, : len(s.step)] = s.step
            prompt_lengths = np.array([len(s.prompt) for s in chosen], np.int32)
            found = score(state.prm.params, state.reference, *(jax.device_put(x, place) for x in (tokens, prompt_lengths, step)))
            found = {k: fetch(v) for k, v in found.items()}
            wrong = None if threshold is None else predict(found[run.config.eval.first_error_score], found["exists"], threshold)
            for i, s in enumerate(chosen[: n - start]):
                yield _row(run, s, {k: v[i] for k, v in found.items()}, None if wrong is None else int(wrong[i]), with_tokens)
            progress.update(min(start + size, n))


def _row(run: Run, s: Encoded, found: dict[str, np.ndarray], first_error: int | None, with_tokens: bool) -> dict[str, Any]:
    steps = int(s.step[-1]) + 1
    row = {
        "row": s.row,
        "outcome": float(found["outcome"]),
        "score": float(found["score"]),
        "steps": [run.builder.decode_response(s.response[s.step == k], run.stop_ids) for k in range(steps)],
        "single": found["single"][:steps],
        "accumulative": found["accumulative"][:steps],
        "first_error": first_error,
    }
    if with_tokens:
        row |= {"tokens": [run.tokenizer.decode([i]) for i in s.response], "token_rewards": found["tokens"][: len(s.response)]}
    return row
