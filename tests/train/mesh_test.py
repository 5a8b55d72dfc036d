"""One program, any mesh: 8 virtual devices compute what one does; nothing large is replicated; nothing is compiled twice or
copied."""

import dataclasses

import jax
import numpy as np
import pytest

from jprm.rl.learner import Learner
from jprm.sharding import mesh as mesh_module
from jprm.train import checkpoint, setup
from jprm.train.phases import make_program
from jprm.train.prompts import replicated
from jprm.train.saver import Saver
from jprm.train.state import TrainState, abstract_state, enter, make_phases
from tests.train.tiny import judged_by_a_coin, tiny_config, write_labelled

SETTINGS = {
    "sft": dict(sft=3),
    "prm": dict(prm=3),
    "rl": dict(rl=3, rl__kl_coef=0.1, rl__prm_order="before", rl__minibatches=2, rl__micro_batch=8),
}
# Adam makes lr x sign(g) of a g that is all rounding, and the scale of rewards divides by them: both want numbers far from 0.
STEADY = {f"{group}__optimizer__eps": 1e-2 for group in SETTINGS} | {"prm__optimizer__lr": 0.05, "rl__optimizer__lr": 0.01}
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4)]
FAST = {("sft", (2, 2, 2)), ("prm", (2, 2, 2)), ("rl", (1, 8, 1)), ("rl", (2, 2, 2))}
CASES = [pytest.param(kind, mesh, marks=() if (kind, mesh) in FAST else pytest.mark.slow) for kind in SETTINGS for mesh in MESHES]
LARGE = 512  # elements; below are norms and scalars


@dataclasses.dataclass
class Done:
    rows: list[dict]  # metrics of each iteration
    state: TrainState
    started: TrainState  # shardings as they were before the first iteration
    compiled: int  # programs of the step
    donated: bool  # the state before the last iteration is gone
    run: setup.Run
    phase: object


@pytest.fixture(scope="module")
def three_iterations(tmp_path_factory):
    """f(kind, mesh): the loop's own pieces on the first devices, once for each."""
    labelled, cache = write_labelled(tmp_path_factory.mktemp("rows") / "rows.jsonl"), {}

    def go(kind, shape):
        size = int(np.prod(shape))
        config = tiny_config(
            "",
            **SETTINGS[kind],
            prm__data=(str(labelled),),
            model__num_heads=4,
            model__num_kv_heads=4,
            model__hidden_size=32,
            rl__group=8,
            **STEADY,
            mesh__data=shape[0],
            mesh__fsdp=shape[1],
            mesh__tensor=shape[2],
        )
        make_mesh, make_task = jax.make_mesh, setup.make_task

        def twenty_words(*args, **kwargs):
            """19 tokens do not divide over ``tensor``."""
            task = make_task(*args, **kwargs)
            tokenizer = task.make_tokenizer()
            tokenizer.add_tokens(["?"])
            return dataclasses.replace(task, make_tokenizer=lambda: tokenizer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mesh_module.jax, "device_count", lambda: size)
            patch.setattr(mesh_module.jax, "make_mesh", lambda *a, **k: make_mesh(*a, **k, devices=jax.devices()[:size]))
            patch.setattr(setup, "make_task", twenty_words)
            run = judged_by_a_coin(config)
        with jax.set_mesh(run.mesh):
            phase = make_phases(config, run.cfg)[0]
            zeros = (replicated(run, np.int32(0)) for _ in range(2))
            state = started = enter(phase, TrainState(*zeros, policy=Learner(run.initial_params(), ())), run.cfg, run.mesh)
            program, rows = make_program(run, phase), []
            for step in range(3):
                before, done = state, program.iterate(state, step)
                state = done.state
                rows.append({k: float(v) for k, v in done.metrics.items()})
        jitted = program.rl.whole if kind == "rl" else program.step
        learners = (before.policy, before.prm) if kind == "rl" else (before.policy if kind == "sft" else before.prm)
        gone = all(x.is_deleted() for x in jax.tree.leaves(learners) if x.size)
        return Done(rows, state, started, jitted._cache_size(), gone, run, phase)

    def cached(kind, shape):
        if (kind, shape) not in cache:
            cache[kind, shape] = go(kind, shape)
        return cache[kind, shape]

    return cached


@pytest.mark.parametrize("kind, mesh", CASES)
def test_a_mesh_computes_what_one_device_does(three_iterations, kind, mesh):
    one, many = three_iterations(kind, (1, 1, 1)), three_iterations(kind, mesh)
    assert dict(many.run.mesh.shape) == dict(zip(("data", "fsdp", "tensor"), mesh))
    for step, (a, b) in enumerate(zip(one.rows, many.rows, strict=True)):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-5, nan_ok=True), f"iteration {step + 1}"
    assert all(row[f"{'actor' if kind == 'rl' else kind}/grad_norm"] > 0 for row in many.rows)
    assert one.rows[0] != one.rows[2]


def replicated_leaves(state) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path((state.policy, state.prm, state.reference))
    return [jax.tree_util.keystr(path) for path, x in leaves if x.size >= LARGE and x.sharding.is_fully_replicated]


def test_nothing_large_is_replicated_under_fsdp(three_iterations, tmp_path):
    """Neither at the start, nor after three iterations, nor after a restore; moments lie as their parameters do."""
    done = three_iterations("rl", (1, 8, 1))
    abstract = abstract_state(done.phase, done.run.cfg, done.run.mesh)
    with Saver(tmp_path, keep=1) as saver:
        saver.save(3, done.state, {})
    restored, _ = checkpoint.restore(tmp_path, lambda meta: abstract)
    for state in (done.started, done.state, restored, abstract):
        large = [x for x in jax.tree.leaves((state.policy, state.prm, state.reference)) if x.size >= LARGE]
        assert len(large) > 20 and not replicated_leaves(state)
    for path, x in jax.tree_util.tree_leaves_with_path(done.state):
        same = next(y for other, y in jax.tree_util.tree_leaves_with_path(restored) if other == path)
        assert same.sharding.is_equivalent_to(x.sharding, x.ndim), path
        np.testing.assert_array_equal(same, x)


def test_the_measure_sees_a_replicated_leaf(three_iterations):
    done = three_iterations("rl", (1, 8, 1))
    everywhere = jax.device_put(done.state.reference, jax.NamedSharding(done.run.mesh, jax.P()))
    assert replicated_leaves(done.state.replace(reference=everywhere))


@pytest.mark.parametrize("kind", SETTINGS)
def test_one_program_for_all_iterations_and_no_second_copy_of_the_state(three_iterations, kind):
    done = three_iterations(kind, (2, 2, 2))
    assert done.compiled == 1 and done.donated
