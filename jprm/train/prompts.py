"""Prompts as arrays and responses as text: where token ids meet strings, on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jprm.data.sequence import encode_prompt
from jprm.errors import UserError
from jprm.tasks.task import Problem
from jprm.train.setup import Run


@dataclasses.dataclass
class PromptBatch:
    """P prompts as arrays (replicated on the mesh) beside the problems they came from.

    tokens: i32[P, max_prompt]; lengths: i32[P]; columns: {name: i32[P]}, the problems' integers, for a device verifier.
    """

    problems: list[Problem]
    tokens: jax.Array
    lengths: jax.Array
    columns: dict[str, jax.Array]


def replicated(run: Run, x: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(run.mesh, PartitionSpec()))


def encode(run: Run, prompt: Any) -> list[int]:
    t = run.config.tokenizer
    return encode_prompt(run.tokenizer, prompt, template=t.template, system=t.system)


def prompt_batch(run: Run, problems: Sequence[Problem]) -> PromptBatch:
    """Encodes problems; a prompt that is empty or longer than the window must have been dropped before (see :func:`usable`)."""
    width = run.config.sampling.max_prompt
    tokens, lengths = np.zeros((len(problems), width), np.int32), np.zeros(len(problems), np.int32)
    for i, problem in enumerate(problems):
        ids = encode(run, problem.prompt)
        if not 0 < len(ids) <= width:
            raise UserError(f"a prompt of {len(ids)} tokens (problem {problem.index})", expected=f"1 to {width} tokens", where="config.sampling.max_prompt",
                            fix=f"Set config.sampling.max_prompt={max(len(ids), width)}, or drop the problem")
        tokens[i, : len(ids)], lengths[i] = ids, len(ids)
    columns = {k: np.array([p.columns[k] for p in problems], np.int32) for k in device_columns(problems)}
    return PromptBatch(list(problems), *(replicated(run, x) for x in (tokens, lengths)), {k: replicated(run, v) for k, v in columns.items()})


def device_columns(problems: Sequence[Problem]) -> list[str]:
    """Names of the columns that are 32-bit integers in every problem: what a device verifier can read."""
    fits = lambda v: isinstance(v, int) and not isinstance(v, bool) and -(2**31) <= v < 2**31
    return [k for k in problems[0].columns if all(fits(p.columns.get(k)) for p in problems)]


def responses(run: Run, tokens: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Response texts without the stop token, and the lengths after stop strings have cut them.

    A stop string ends the response before its first occurrence: tokens from the first one that completes it are dropped.
    """
    texts, lengths = [], np.array(lengths)
    for i in range(len(tokens)):
        ids = tokens[i, prompt_lengths[i] : lengths[i]]
        text = _decode(run, ids)
        found = [text.find(s) for s in run.config.sampling.stop_strings if s in text]
        if found:
            n = next(n for n in range(1, len(ids) + 1) if any(s in _decode(run, ids[:n]) for s in run.config.sampling.stop_strings))
            lengths[i], text = prompt_lengths[i] + n, text[: min(found)]
        texts.append(text)
    return texts, lengths


def _decode(run: Run, ids: np.ndarray) -> str:
    ids = ids[:-1] if len(ids) and run.is_stop[ids[-1]] else ids
    return run.tokenizer.decode(ids, skip_special_tokens=True)
