"""A run that fits into a test: one-operation sums, a model of one layer, phases of a few iterations."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from jprm.errors import UserError
from jprm.tasks.task import make_task
from jprm.train import loop
from jprm.train.config import default_config
from jprm.train.setup import Run, build


def tiny_config(workdir, *, sft=0, prm=0, rl=0, **changes) -> ConfigDict:
    """A locked config; ``changes`` are dotted keys with ``__`` for the dot."""
    c = default_config()
    c.workdir = str(workdir)
    c.model.hidden_size, c.model.intermediate_size, c.model.num_layers = 16, 32, 1
    c.model.num_heads = c.model.num_kv_heads = 2
    c.model.head_dim = 8
    c.task.options = ConfigDict(dict(operations=1, low=0, high=3))
    c.sampling.max_prompt, c.sampling.max_new = 4, 10
    c.sft.batch_size, c.sft.optimizer.warmup, c.sft.optimizer.lr = 8, 0, 0.02
    c.sft.max_length = 16
    c.prm.batch_size, c.prm.max_length, c.prm.beta, c.prm.max_steps = 8, 16, 0.5, 3
    c.sft.steps, c.prm.steps, c.rl.iterations = sft, prm, rl
    c.rl.prompts, c.rl.group, c.rl.mask_uniform = 4, 4, False  # every batch teaches something
    c.eval.problems = 0
    c.log.tensorboard, c.log.samples_every = False, 0
    for key, value in changes.items():
        *groups, last = key.split("__")
        group = c
        for name in groups:
            group = group[name]
        group[last] = value
    return c.lock()


def write_labelled(path: pathlib.Path, rows: int = 60) -> pathlib.Path:
    """Outcome-labelled rows of the tiny task, about half of them right."""
    task = make_task(tiny_config("").task)
    with open(path, "w") as file:
        for i in range(rows):
            p = task.train[i]
            text = task.demonstration(p, 0)
            text = text if i % 2 else text[:-1] + str((int(text[-1]) + 1) % 10)
            file.write(json.dumps({"prompt": p.prompt, "response": text, "label": int(task.verify([p], [text])[0].score)}) + "\n")
    return path


def judged_by_a_coin(config) -> Run:
    """A run whose device verifier finds about every second response right, whatever the policy: the parity of its token ids."""

    def verify(tokens, prompt_lengths, lengths, columns):
        at = jnp.arange(tokens.shape[1])
        response = jnp.where((at >= prompt_lengths[:, None]) & (at < lengths[:, None]), tokens, 0)
        outcome = (jnp.sum(response, axis=1) % 2).astype(jnp.float32)
        return outcome, jnp.ones_like(outcome, bool)

    run = build(config)
    return dataclasses.replace(run, task=dataclasses.replace(run.task, device_verifier=lambda tokenizer: verify))


def refused(config: ConfigDict) -> UserError:
    """The error that training by a config ends with; it has all its four parts."""
    with pytest.raises(UserError) as error:
        loop.run(config)
    e = error.value
    assert e.found and e.expected and e.where and e.fix
    return e
