"""`jprm sample`: the policy's answers to the prompts of a file."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jprm.data.batches import PromptBatches
from jprm.data.records import Account
from jprm.data.schemas import read_prompts
from jprm.tasks.task import Problem, Verdict
from jprm.train.output import check_new, json_lines
from jprm.train.progress import Progress
from jprm.train.prompts import place, replicated, responses
from jprm.train.restore import restore_roles
from jprm.train.rollout import fetch, make_sampler
from jprm.train.setup import Run, build

STREAM = 2_000_003  # folded into the seed: neither training's noise nor evaluation's


def run(config: Any, prompts: str, out: str, step: int | None = None) -> int:
    """Writes ``eval.samples`` rows per prompt to ``out``, JSON lines, in the file's order:

        {"row": 0, "sample": 0, "prompt": ..., "response": ..., "tokens": 17, "logp": -3.2, "stopped": true, "score": 1.0}

    ``row`` counts the file's rows from 0, those that were left out included. ``logp`` is the sum over the response's tokens under
    the distribution they were drawn from; ``stopped`` is false where ``sampling.max_new`` cut the response; ``score`` is the
    verdict of the run's task, null where the row has no answer or the verifier could not say.

    Args:
      config: of the run; ``sampling`` says how to draw (temperature 0 is greedy), ``eval.batch`` how many prompts at once.
      prompts: .jsonl, .json or .parquet, with or without answers.
      out: a new file.
      step: the checkpoint's number; None: the newest; without any, ``config.model.path`` answers.

    Raises:
      UserError: ``out`` is taken, no usable prompt, no policy.
    """
    target = check_new(out)
    the_run = build(config)
    try:
        problems = usable(the_run, prompts)
        with jax.set_mesh(the_run.mesh), json_lines(target) as write:
            state, source = restore_roles(the_run, ("policy",), step=step)
            right = judged = 0
            for row in draw_all(the_run, state.policy.params, problems):
                write(row)
                judged, right = judged + (row["score"] is not None), right + (row["score"] or 0.0)
    finally:
        the_run.task.close()
    if jax.process_index() == 0:
        verdicts = f"; {right / judged:.3f} is the mean of {judged} verdicts" if judged else "; no verdicts"
        print(f"{source}: {len(problems)} prompts x {config.eval.samples} responses{verdicts}: {target}")
    return 0


def usable(run: Run, path: str) -> list[Problem]:
    """The prompts of a file that fit the window; the others are counted by reason. `Problem.index` is the row in the file.

    Raises:
      UserError: the file cannot be read, or no prompt is left.
    """
    account, width, kept = Account("prompts"), run.config.sampling.max_prompt, []
    for row, q in read_prompts(
        path, account, prompt_column=run.config.task.prompt_column, answer_column=run.config.task.answer_column
    ):
        if 0 < len(run.builder.prompt_ids(q.prompt)) <= width:
            kept.append(Problem(row, q.prompt, q.answer, q.columns))
        else:
            account.rows_out -= 1
            account.drop(f"longer than config.sampling.max_prompt = {width} tokens, or empty", f"row {row}")
    account.close(path)
    if jax.process_index() == 0:
        print(account)
    return kept


def draw_all(run: Run, params: Any, problems: list[Problem]) -> Iterator[dict[str, Any]]:
    """Yields the rows of all problems, batch by batch, prompt-major."""
    group, n = run.config.eval.samples, len(problems)
    size = -(-min(run.config.eval.batch, n) // run.row_shards) * run.row_shards  # one shape; a short last batch is filled up
    batches = PromptBatches(problems, run.builder, length=run.config.sampling.max_prompt, seed=0)
    draw = jax.jit(make_sampler(run, run.sampling, group))
    seed = replicated(run, jnp.uint32((run.config.seed + STREAM) % 2**32))
    with Progress(interval_s=run.config.log.every_s) as progress:
        progress.start("sample", n)
        for start in range(0, n, size):
            chosen = [problems[(start + i) % n] for i in range(size)]
            batch = place(run, batches.of(chosen))
            s = draw(params, batch.tokens, batch.lengths, seed, jnp.int32(0), replicated(run, jnp.int32(start * group)))
            kept = min(size, n - start)
            tokens, prompt_lengths, lengths, logp, stopped = (
                fetch(x)[: kept * group] for x in (s.tokens, s.prompt_lengths, s.lengths, s.logp, s.stopped)
            )
            texts, ends, cut = responses(run, tokens, prompt_lengths, lengths)
            rows = [chosen[r // group] for r in range(kept * group)]
            verdicts = judge(run, rows, texts, [tokens[r, prompt_lengths[r] : ends[r]].tolist() for r in range(len(rows))])
            for r, (problem, verdict) in enumerate(zip(rows, verdicts)):
                yield {
                    "row": problem.index,
                    "sample": r % group,
                    "prompt": problem.prompt,
                    "response": texts[r],
                    "tokens": int(ends[r] - prompt_lengths[r]),
                    "logp": float(logp[r, : ends[r]].sum()),
                    "stopped": bool(stopped[r] or cut[r]),
                    "score": verdict.score if verdict.known else None,
                }
            progress.update(start + kept)


def judge(run: Run, problems: list[Problem], texts: list[str], ids: list[list[int]]) -> list[Verdict]:
    """Verdicts by the run's task; a problem without an answer gets none."""
    asked = [r for r, problem in enumerate(problems) if problem.answer]
    verdicts = [Verdict(0.0, known=False)] * len(problems)
    if asked:
        for r, verdict in zip(asked, run.task.verify(*([x[r] for r in asked] for x in (problems, texts, ids))), strict=True):
            verdicts[r] = verdict
    return verdicts
