"""What a phase reads, and is refused before anything is written: rows that do not fit, names that are none, groups of one."""

import dataclasses
import json
import logging
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from jprm.errors import UserError
from jprm.tasks.task import Problem
from jprm.train import loop, setup
from jprm.train.metrics import read_metrics
from jprm.train.phases import make_program
from jprm.train.sources import prompt_batches, sft_batches
from jprm.train.state import make_phases
from tests.train.tiny import tiny_config

PLAIN = dict(rl__process_weight=0.0)  # no PRM: half the program


def refused(config) -> UserError:
    """The error with which training by a config ends, before it has a folder."""
    with pytest.raises(UserError) as error:
        loop.run(config)
    assert not pathlib.Path(config.workdir).exists()
    return error.value


# ------------------------------------------------------------------------------------------------ rows that do not fit


@pytest.mark.parametrize(
    "phase, key, size",
    [("rl", "sampling.max_prompt", 4), ("sft", "sft.max_length", 13)],
)
def test_the_longest_row_of_a_task_has_to_fit(tmp_path, phase, key, size):
    """ "3+3=" and its demonstration "3+3=6;#6", with the end of the turn; one token less is refused whatever is drawn first."""
    small, fits = (tiny_config(tmp_path / "run", **{phase: 1, key.replace(".", "__"): n}) for n in (size - 1, size))
    e = refused(small)
    assert e.found.startswith("a task whose longest ") and f"has {size} tokens (3+3=" in e.found
    assert e.expected == f"at most {size - 1}" and e.where == f"config.{key}" and e.fix.startswith(f"Set config.{key}={size},")
    run = setup.build(fits)
    (prompt_batches if phase == "rl" else sft_batches)(run)


def test_another_tokenizer_may_make_fewer_ids_of_the_longest_text(tmp_path):
    """Where characters are merged, the longest text need not have the most ids: only what is drawn decides."""

    class Pairs:
        """Two characters to an id, whatever they are."""

        pad_token_id = eos_token_id = 0

        def __call__(self, text, **_):
            return type("Encoding", (), {"input_ids": [1] * (len(text) // 2 + len(text) % 2 + (4 if "3" in text else 0))})

    run = setup.build(tiny_config(tmp_path, rl=1))
    run = dataclasses.replace(run, tokenizer=Pairs(), builder=setup.SequenceBuilder(Pairs()))
    assert prompt_batches(run).batch(0, 8).lengths.max() <= 4  # "3+3=" would have 6


class Mixed(Sequence):
    """Sums of one and two digits: every third prompt has 6 characters, the others 4."""

    def __len__(self):
        return 300

    def __getitem__(self, index):
        a, b = (10, 12) if index % 3 == 0 else (index % 9, 1)
        return Problem(index, f"{a}+{b}=", str(a + b), {"answer": a + b})


def with_mixed_prompts(config):
    run = setup.build(config)
    task = dataclasses.replace(run.task, train=Mixed(), longest=None)
    return dataclasses.replace(run, task=task)


def test_a_run_goes_on_past_generated_prompts_that_do_not_fit(tmp_path, monkeypatch):
    """… with the count in its metrics and its log."""
    monkeypatch.setattr(loop, "build", with_mixed_prompts)
    config = tiny_config(tmp_path / "run", rl=3, sft=2, rl__prompts=8, rl__group=2, log__samples_every=1, **PLAIN)
    assert loop.run(config) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["phase"] for row in rows] == ["sft"] * 2 + ["rl"] * 3
    run = with_mixed_prompts(config)
    demonstrations, batches = sft_batches(run), prompt_batches(run)
    expected = [demonstrations.batch(i, 8).passed_over for i in range(2)] + [batches.batch(i, 8).passed_over for i in range(3)]
    assert [row["data/passed_over"] for row in rows] == expected and sum(expected[:2]) > 1 and sum(expected[2:]) > 1
    sampled = (tmp_path / "run" / "samples" / "000003.jsonl").read_text().splitlines()
    ids = [json.loads(line)["prompt_id"] for line in sampled]
    assert ids == np.repeat(batches.batch(0, 8).rows, 2).tolist() and not any(i % 3 == 0 for i in ids)
    assert "generated prompts: 34 of 100 dropped for more than 4 tokens" in (tmp_path / "run" / "run.log").read_text()


# ------------------------------------------------------------------------------------------------ prompts out of order


def test_samples_of_an_oversampled_round_name_their_own_prompts(tmp_path, monkeypatch):
    """The verdict is a figure of the prompt alone, and only some figures are kept: every row of the file has its own."""

    def build(config):
        def verify(tokens, prompt_lengths, lengths, columns):
            prompt = jnp.where(jnp.arange(tokens.shape[1]) < prompt_lengths[:, None], tokens, 0)
            return jnp.sum(prompt, axis=1) / 64, jnp.ones(len(tokens), bool)

        run = setup.build(config)
        return dataclasses.replace(run, task=dataclasses.replace(run.task, device_verifier=lambda tokenizer: verify))

    monkeypatch.setattr(loop, "build", build)
    band = dict(rl__mask_uniform=False, rl__band_low=0.61, rl__band_high=0.64)
    config = tiny_config(
        tmp_path / "run", rl=1, rl__prompts=8, rl__group=2, rl__oversample=2, log__samples_every=1, **band, **PLAIN
    )
    assert loop.run(config) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples" / "000001.jsonl").read_text().splitlines()]
    run = setup.build(config)
    drawn = prompt_batches(run).batch(0, 16).rows
    assert len(rows) == 16 and [row["row"] for row in rows] == list(range(16))
    for row in rows:
        ids = run.builder.prompt_ids(row["prompt"])
        assert row["outcome"] == sum(ids) / 64 and row["prompt"] == run.task.train[row["prompt_id"]].prompt
        assert row["valid"] == (0.61 <= row["outcome"] <= 0.64)
    kept = [drawn.index(row["prompt_id"]) for row in rows[::2]]
    assert [row["prompt_id"] for row in rows[1::2]] == [row["prompt_id"] for row in rows[::2]]
    assert kept == sorted(kept) and kept != list(range(8)) and 0 < sum(row["valid"] for row in rows) < 16


# ------------------------------------------------------------------------------------------------ refused or said at the start


@pytest.mark.parametrize("group", [1, 2])
def test_a_group_of_one_is_warned_of(tmp_path, caplog, group):
    config = tiny_config(tmp_path, rl=1, rl__group=group, rl__prompts=8, **PLAIN)
    run = setup.build(config)
    with caplog.at_level(logging.WARNING, "jprm"):
        make_program(run, make_phases(config, run.cfg)[0])
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (group == 1)
    assert group == 2 or said[0].startswith("config.rl.group=1: ") and "advantage 0 (config.rl.estimator=rloo)" in said[0]


@pytest.mark.parametrize("key", ["rl.aggregation", "rl.kl_kind", "rl.kl_in", "rl.prm_rows", "rl.old_logp", "prm.balance"])
def test_a_name_that_is_none_is_refused_before_anything_is_written(tmp_path, key):
    e = refused(tiny_config(tmp_path / "run", rl=1, **{key.replace(".", "__"): "nothing"}))
    assert e.where == f"config.{key}" and "'nothing'" in e.found and e.expected.startswith("one of ") and e.fix.startswith("Set ")
