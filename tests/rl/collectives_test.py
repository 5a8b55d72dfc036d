"""Group statistics move scalars, never tokens: read off the compiled advantage program on several meshes.

Seen to fail: a reshape of token arrays to [P, G, T] before the sum over T gathers R x T floats where groups lie across devices.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.rl.compositions import build_advantage
from jprm.rl.normalise import norm, whiten
from jprm.rl.rollouts import to_window, window
from jprm.rl.signal import advantage, channel, column
from tests.rl.batches import random_rollouts

S, T, N = 4, 64, 48
COLLECTIVE = re.compile(
    r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter)(?:-start)?\("
)
CASES = [  # prompts, samples, meshes (data, fsdp, tensor); 3 prompts over 8 devices: groups are cut
    (4, 4, [(2, 4, 1)]),
    (3, 8, [(8, 1, 1), (2, 2, 2)]),
]
PROGRAMS = {
    "token": build_advantage(process_weight=1.0, whiten=True, formula="prime_code", process_gamma=0.9, outcome_gamma=0.9),
    "step": build_advantage(
        process_weight=1.0, granularity="step", max_steps=S, process_scale="rms", contrast_only=True, estimator="grpo"
    ),
    # every token of a group in one pool, tokens being where a group lies across devices
    "pooled": lambda rollouts, q: advantage([channel("tokens", column("q", "token"), norm("group"))], [whiten()])(
        rollouts.replace(columns={"q": q})
    ),
}


def largest_collective(text: str) -> int:
    """Floats in the largest result of any collective of an HLO text."""
    sizes = [0]
    for results in COLLECTIVE.findall(text):
        for dims in re.findall(r"\w+\[([\d,]*)\]", results):
            sizes.append(int(np.prod([int(d) for d in dims.split(",") if d], initial=1)))
    return max(sizes)


def program(f, mesh_shape=None):
    def compute(rollouts, q):
        return f(to_window(rollouts, N), window(q, rollouts.prompt_lengths, N))

    if mesh_shape is None:
        return jax.jit(compute), None
    mesh = jax.make_mesh(mesh_shape, ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
    return jax.jit(compute, in_shardings=rows), rows


@pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("prompts, group, meshes", CASES)
def test_advantage_moves_no_tokens(prompts, group, meshes, f):
    rollouts, q, _, _ = random_rollouts(0, prompts, group, T, max_steps=S, prompt_length=T - N)
    q = jnp.asarray(q)
    want = program(f)[0](rollouts, q)
    for mesh_shape in meshes:
        sharded, rows = program(f, mesh_shape)
        placed = jax.device_put((rollouts, q), rows)
        compiled = sharded.lower(*placed).compile()
        assert 0 < largest_collective(compiled.as_text()) <= prompts * group * S, mesh_shape
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), compiled(*placed), want)


def test_the_measure_sees_a_gather():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    f = jax.jit(
        lambda x: x * 2,
        in_shardings=jax.sharding.NamedSharding(mesh, spec("data")),
        out_shardings=jax.sharding.NamedSharding(mesh, spec()),
    )
    assert largest_collective(f.lower(jax.ShapeDtypeStruct((16, 5), jnp.float32)).compile().as_text()) == 80
