"""Prompts on the device and responses as text: where token ids meet strings."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jprm.data import batches
from jprm.rl.rollouts import step_ids
from jprm.tasks.task import Problem
from jprm.train.setup import Run


@dataclasses.dataclass
class PromptBatch:
    """P prompts on the mesh, replicated, beside the problems they came from.

    tokens: i32[P, max_prompt]; lengths: i32[P]; columns: {name: i32[P]}, the problems' integers, for a device verifier.
    """

    problems: list[Problem]
    tokens: jax.Array
    lengths: jax.Array
    columns: dict[str, jax.Array]


def replicated(run: Run, x: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(run.mesh, PartitionSpec()))


def place(run: Run, batch: batches.PromptBatch) -> PromptBatch:
    return PromptBatch(batch.problems, *(replicated(run, x) for x in (batch.tokens, batch.lengths, batch.columns)))


def responses(
    run: Run, tokens: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Response texts without the stop token, the lengths after stop strings have cut them, and bool[R] which they have cut.

    The text ends before the first stop string, the tokens with the one that completes it: that may be the last of the row.
    """
    texts, lengths, cut = [], np.array(lengths), np.zeros(len(tokens), bool)
    for i in range(len(tokens)):
        ids = tokens[i, prompt_lengths[i] : lengths[i]]
        text = run.builder.decode_response(ids, run.stop_ids)
        found = [text.find(s) for s in run.config.sampling.stop_strings if s in text]
        if found:
            n = next(
                n
                for n in range(1, len(ids) + 1)
                if any(s in run.builder.decode_response(ids[:n], run.stop_ids) for s in run.config.sampling.stop_strings)
            )
            lengths[i], cut[i], text = prompt_lengths[i] + n, True, text[: min(found)]
        texts.append(text)
    return texts, lengths, cut


def response_steps(run: Run, ids: np.ndarray) -> np.ndarray:
    """i32[N]: the step of every token of one response, as in training but never merged."""
    everything = np.ones((1, len(ids)), bool)
    return np.asarray(step_ids(np.asarray(ids)[None], everything, run.is_separator, len(ids) + 1, run.is_stop)[0][0])
