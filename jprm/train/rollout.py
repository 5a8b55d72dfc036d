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
from jprm.rl.rollouts import Rollouts, from_samples
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


def to_rollouts(run: Run, s: Samples, outcome: jax.Array, known: jax.Array, group: int) -> Rollouts:
    """Samples and verdicts as `Rollouts`, with the columns ``stopped`` and ``prompt``: bool[R] and i32[R], the position of a
    row's prompt in the batch, which selection re-orders."""
    rollouts = from_samples(
        s,
        outcome,
        known,
        group=group,
        is_separator_V=jnp.asarray(run.is_separator),
        is_stop_V=jnp.asarray(run.is_stop),
        max_steps=run.config.prm.max_steps,
    )
    here = {"stopped": s.stopped, "prompt": jnp.arange(s.lengths.shape[0], dtype=jnp.int32) // group}
    return rollouts.replace(columns={**rollouts.columns, **here})


def verify_on_host(run: Run, batch: PromptBatch, s: Samples, group: int) -> tuple[Samples, jax.Array, jax.Array]:
    """(samples, outcome f32[R], known bool[R]) by the task's verifier; the samples end where stop strings have cut them.

    With several processes each row is judged by exactly one, and all get its verdict: verifiers may disagree with themselves.
    A non-finite score is no verdict.
    """
    tokens, prompt_lengths, lengths = (fetch(x) for x in (s.tokens, s.prompt_lengths, s.lengths))
    texts, lengths, cut = responses(run, tokens, prompt_lengths, lengths)
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
    where = sharding(run.mesh, ("rows",))
    arrays = (lengths.astype(np.int32), fetch(s.stopped) | cut, outcome, known)
    lengths, stopped, outcome, known = (jax.device_put(x, where) for x in arrays)
    return s.replace(lengths=lengths, stopped=stopped), outcome, known


def fetch(x: Any) -> np.ndarray:
    """A global array on every host."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(jax.device_get(x))
