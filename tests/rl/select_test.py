"""Bands, contrast and keeping P of c x P prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprm.errors import UserError
from jprm.rl.select import group_accuracy, has_contrast, in_band, keep_prompts, take_prompts, to_rows
from tests.rl.batches import random_rollouts

NAN = float("nan")
GROUPS = {  # outcomes, labelled, accuracy, in [.2, .8], contrast
    "mixed": ([1, 0, 0, 0, 0], "11111", 0.2, True, True),  # bounds are inclusive
    "upper bound": ([1, 1, 1, 1, 0], "11111", 0.8, True, True),
    "all right": ([1, 1, 1, 1, 1], "11111", 1.0, False, False),
    "all wrong": ([0, 0, 0, 0, 0], "11111", 0.0, False, False),
    "unlabelled NaN does not count": ([1, 0, NAN, NAN, NAN], "11000", 0.5, True, True),
    "contrast only with an unlabelled row": ([1, 1, 0, 1, 1], "11011", 1.0, False, False),
    "one labelled": ([1, 0, 0, 0, 0], "10000", 1.0, False, False),
    "none labelled": ([NAN] * 5, "00000", 0.0, False, False),
    "graded": ([0.5, 0.5, 0.5, 0.5, 0.5], "11111", 0.5, True, False),
}


@pytest.mark.parametrize("outcome, labelled, accuracy, band, contrast", GROUPS.values(), ids=GROUPS)
def test_groups(outcome, labelled, accuracy, band, contrast):
    outcome, labelled = jnp.array(outcome, jnp.float32), jnp.array([c == "1" for c in labelled])
    assert float(group_accuracy(outcome, labelled, 5)[0][0]) == pytest.approx(accuracy)
    assert bool(in_band(outcome, labelled, 5, 0.2, 0.8)[0]) is band
    assert bool(has_contrast(outcome, labelled, 5)[0]) is contrast


def test_rows_repeat_their_prompt():
    assert to_rows(jnp.array([True, False]), 2).tolist() == [True, True, False, False]


def test_passing_first_in_order_then_fill_ins():
    passed = jnp.array([0, 1, 0, 1, 0, 0, 0, 1], bool)
    index, valid = keep_prompts(passed, 4, shards=2)
    assert index.tolist() == [[1, 3], [3, 0]]  # within the shard: the second has one that passed and fills with its first
    assert valid.tolist() == [True, True, True, False]


def test_no_group_passes():
    index, valid = keep_prompts(jnp.zeros(4, bool), 2)
    assert index.tolist() == [[0, 1]] and not valid.any()


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]))
def test_kept_rows_are_whole_groups_of_their_own_shard(seed, shards):
    rollouts, *_ = random_rollouts(seed, 8, 3, 5)
    rollouts = rollouts.replace(columns={"row": jnp.arange(24)})
    passed = in_band(rollouts.outcome, rollouts.labelled, 3, 0.2, 0.8)
    index, valid = keep_prompts(passed, 4, shards)
    kept = take_prompts(rollouts, index, 3)
    rows = np.asarray(kept.columns["row"]).reshape(4, 3)
    assert (rows % 3 == [0, 1, 2]).all() and kept.group == 3
    prompts = rows[:, 0] // 3
    assert (prompts // (8 // shards) == np.repeat(np.arange(shards), 4 // shards)).all()
    np.testing.assert_array_equal(np.asarray(passed)[prompts], valid)
    np.testing.assert_array_equal(kept.tokens.shape, (12, 5))
    for s in range(shards):  # no prompt that passed is left behind while a fill-in is kept
        size = 8 // shards
        assert valid.reshape(shards, -1)[s].sum() == min(int(passed[s * size : (s + 1) * size].sum()), 4 // shards)


def test_no_row_moves_between_devices():
    mesh = jax.make_mesh((2, 4, 1), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))

    def f(passed, x):
        index, valid = keep_prompts(passed, 8, shards=8)
        return take_prompts(x, index, 2), valid

    compiled = (
        jax.jit(f, in_shardings=(rows, rows), out_shardings=rows)
        .lower(jax.ShapeDtypeStruct((16,), bool), jax.ShapeDtypeStruct((32, 5), jnp.float32))
        .compile()
    )
    text = compiled.as_text()
    assert not any(f" {name}" in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("generated, prompts, shards", [(8, 3, 2), (7, 4, 2), (4, 8, 1)])
def test_impossible_quotas(generated, prompts, shards):
    with pytest.raises(UserError) as error:
        keep_prompts(jnp.zeros(generated, bool), prompts, shards)
    assert (
        str(generated) in error.value.found
        and error.value.where == "config.rl.prompts"
        and error.value.expected
        and error.value.fix
    )
