"""One round of experience: sample on the device, verify on the device or on the host, and hand over `Rollouts`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jprm.errors import UserError
from jprm.model.decode import Samples, sample
from jprm.model.sampling import Sampling, row_keys
from jprm.model.spec import Params
from jprm.rl.rollouts import Rollouts, step_ids
from jprm.sharding.rules import sharding
from jprm.train.prompts import PromptBatch, responses
from jprm.train.setup import Run


def make_sampler(run: Run, sampling: Sampling, group: int) -> Callable[..., Samples]:
    """``draw(params, tokens_PxN, lengths_P, seed, iteration, first_row=0) -> Samples``, to be jitted."""

    def draw(
        params: Params, tokens: jax.Array, lengths: jax.Array, seed: jax.Array, iteration: jax.Array, first_row: Any = 0
    ) -> Samples:
        keys = row_keys(seed, iteration, tokens.shape[0] * group, first_row)
        return sample(params, run.cfg, tokens, lengths, keys, group=group, sampling=sampling)

    return draw


def device_verifier(run: Run) -> Callable | None:
    """The task's verifier as a JAX function, where it has one, it is wanted, and no text has to be looked at."""
    wanted = run.config.task.verifier == "auto" and not run.config.sampling.stop_strings
    return run.task.device_verifier(run.tokenizer) if wanted and run.task.device_verifier else None


def to_rollouts(
    run: Run, s: Samples, outcome: jax.Array, known: jax.Array, group: int, lengths: jax.Array | None = None
) -> Rollouts:
    """Samples and verdicts as `Rollouts`; ``lengths`` where stop strings have shortened the responses."""
    lengths = s.lengths if lengths is None else lengths
    stopped = s.stopped | (lengths < s.lengths)
    position = jnp.arange(s.tokens.shape[1])
    action = (position >= s.prompt_lengths[:, None]) & (position < lengths[:, None])
    step, merged = step_ids(s.tokens, action, jnp.asarray(run.is_separator), run.config.prm.max_steps, jnp.asarray(run.is_stop))
    return Rollouts(
        tokens=s.tokens,
        lengths=lengths,
        prompt_lengths=s.prompt_lengths,
        action=action,
        step=step,
        turn=jnp.where(action, 0, -1),
        behavior_logp=s.logp,
        outcome=outcome,
        known=known,
        valid=jnp.ones(lengths.shape, bool),
        columns={"merged_steps": merged, "stopped": stopped},
        group=group,
    )


def verify_on_host(run: Run, batch: PromptBatch, s: Samples, group: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(outcome f32[R], known bool[R], lengths i32[R]) by the task's verifier.

    With several processes each row is judged by exactly one, and all get its verdict: verifiers may disagree with themselves.
    A non-finite score is no verdict.
    """
    tokens, prompt_lengths, lengths = (fetch(x) for x in (s.tokens, s.prompt_lengths, s.lengths))
    texts, lengths = responses(run, tokens, prompt_lengths, lengths)
    R, n, mine = len(texts), jax.process_count(), jax.process_index()
    rows = range(mine, R, n)
    problems = [batch.problems[r // group] for r in rows]
    ids = [tokens[r, prompt_lengths[r] : lengths[r]].tolist() for r in rows]
    verdicts = run.task.verify(problems, [texts[r] for r in rows], ids)
    if len(verdicts) != len(problems):
        raise UserError(
            f"{len(verdicts)} verdicts for {len(problems)} responses",
            expected="one verdict per response, in order",
            where="config.task.verifier",
            fix="Return a list as long as the responses",
        )
    outcome, known = np.zeros(R, np.float32), np.zeros(R, bool)
    for r, v in zip(rows, verdicts):
        known[r] = v.known and np.isfinite(v.score)
        outcome[r] = v.score if known[r] else 0.0
    if n > 1:
        outcome, known = (np.sum(multihost_utils.process_allgather(x), axis=0).astype(x.dtype) for x in (outcome, known))
    place = sharding(run.mesh, ("rows",))
    return jax.device_put(outcome, place), jax.device_put(known, place), jax.device_put(lengths.astype(np.int32), place)


def fetch(x: Any) -> np.ndarray:
    """A global array on every host."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(jax.device_get(x))
