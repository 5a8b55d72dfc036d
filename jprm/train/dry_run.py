"""`jprm train --dry_run`: everything a run would hold, compile and compute, said before any of it happens.

Nothing is allocated on a device and nothing is written. Data files are read and encoded, and each phase's program is traced,
exactly as training does it, so that their errors are found here.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jprm.model.spec import abstract_params, count_params, forward_flops, named_specs
from jprm.sharding.rules import sharding
from jprm.train.checkpoint import state_bytes
from jprm.train.config import flat
from jprm.train.evaluation import Evaluator
from jprm.train.phases import Program, RLProgram, make_program
from jprm.train.setup import Run, build
from jprm.train.state import Phase, TrainState, abstract_state, make_phases
from jprm.train.supervised import Rows


def run(config: Any) -> int:
    """Prints the report.

    Raises:
      UserError: whatever training would raise before its first iteration, checkpoints and the state of the workdir aside.
    """
    the_run = build(config)
    try:
        phases = make_phases(config, the_run.cfg)
        with jax.set_mesh(the_run.mesh):
            programs = [make_program(the_run, phase) for phase in phases]
            if config.eval.problems and phases[-1].has_policy:
                Evaluator(the_run)  # its problems are read and checked
            for line in report(the_run, phases, programs):
                print(line)
    finally:
        the_run.task.close()
    return 0


def report(run: Run, phases: list[Phase], programs: list[Program]) -> Iterator[str]:
    """The lines of the report."""
    cfg, mesh = run.cfg, run.mesh
    devices = f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}"
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    yield f"run       {run.config.name}, in {run.workdir} (not touched)"
    yield f"devices   {devices}: {axes}; {jax.process_count()} process(es)"
    source = run.config.model.path or "from scratch"
    yield f"model     {cfg.family} {source}: {count_params(cfg):,} parameters, computed in {cfg.dtype}"
    s = run.config.sampling
    yield f"sequence  {s.max_prompt} prompt + {s.max_new} response tokens; stop ids {list(run.stop_ids)}"
    yield ""
    yield from parameter_table(run)
    for phase, program in zip(phases, programs):
        state = abstract_state(phase, cfg, mesh)
        trace(run, phase, program, state)
        yield ""
        yield f"phase {phase.name}: iterations {phase.start + 1} to {phase.end}"
        yield from memory_table(state)
        yield from program_table(run, phase, program)
    yield ""
    yield "Not counted: activations, gradients (one fp32 copy of a learner's parameters while it is updated), the key/value cache"
    yield f"of sampling ({mebi(cache_bytes(run))} MiB at the largest batch, over all devices), and what the compiler adds."
    yield ""
    yield "config"
    yield from (f"  {key} = {value!r}" for key, value in flat(run.config))


# ------------------------------------------------------------------------------------------------ what it holds


def parameter_table(run: Run) -> Iterator[str]:
    """Every parameter; policy, PRM and reference share these shapes."""
    params = jax.tree.leaves(abstract_params(run.cfg, run.mesh))
    rows = [("parameter", "shape", "dtype", "sharding")]
    for name, leaf in zip(named_specs(run.cfg), params, strict=True):
        rows.append(
            (
                name,
                "x".join(map(str, leaf.shape)),
                str(leaf.dtype),
                ", ".join("-" if a is None else str(a) for a in leaf.sharding.spec),
            )
        )
    widths = [max(len(row[c]) for row in rows) for c in range(4)]
    yield from ("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def memory_table(state: TrainState) -> Iterator[str]:
    """Bytes of each role, in all and on the fullest device."""
    yield f"  {'role':<24}{'dtype':<10}{'MiB in all':>12}{'MiB a device':>14}"
    parts = {}
    for role in ("policy", "prm"):
        if (learner := getattr(state, role)) is not None:
            parts |= {f"{role} parameters": learner.params, f"{role} optimizer": learner.opt_state}
    parts |= {"reference parameters": state.reference} if state.reference is not None else {}
    for name, tree in (*parts.items(), ("together", state)):
        if leaves := jax.tree.leaves(tree):
            dtype = "" if tree is state else str(max(leaves, key=lambda x: x.size).dtype)
            yield f"  {name:<24}{dtype:<10}{mebi(state_bytes(tree)):>12}{mebi(device_bytes(tree)):>14}"


def device_bytes(tree: Any) -> int:
    """Bytes of an abstract tree that lie on one device: sharded leaves by their share, replicated ones whole."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def cache_bytes(run: Run) -> int:
    """Keys and values of the largest sampling call, over all devices."""
    c, cfg = run.config, run.cfg
    rl = c.rl.prompts * c.rl.oversample * c.rl.group if c.rl.iterations else 0
    held_out = min(c.eval.batch, c.eval.problems) * max(c.eval.samples, c.eval.pass_k)
    return 2 * cfg.num_layers * max(rl, held_out) * run.length * cfg.num_kv_heads * cfg.head_dim * jnp.dtype(cfg.dtype).itemsize


# ------------------------------------------------------------------------------------------------ what it computes


def program_table(run: Run, phase: Phase, program: Program) -> Iterator[str]:
    """The programs of a phase with their static shapes, and the work of one iteration by formula (padding included)."""
    found = rl_programs(run, phase, program.rl.fused) if isinstance(program, RLProgram) else row_programs(run, phase)
    yield f"  {'program':<28}{'rows':>8}{'tokens a row':>14}{'model GFLOPs':>15}"
    for name, rows, length, flops in found:
        yield f"  {name:<28}{rows:>8}{length:>14}{flops / 1e9:>15,.3f}"
    iteration = [(rows, length, flops) for name, rows, length, flops in found if not name.startswith("evaluate")]
    tokens = max(rows * length for rows, length, _ in iteration)
    bound = ", at most: sampling ends with the last response" if phase.name == "rl" else ""
    yield f"  one iteration: {tokens:,} tokens, {sum(f for *_, f in iteration) / 1e9:,.3f} model GFLOPs{bound}"


def row_programs(run: Run, phase: Phase) -> list[tuple[str, int, int, int]]:
    """(name, rows, tokens a row, FLOPs) of SFT or the offline PRM. A backward pass is two forward passes."""
    group = run.config[phase.name]
    rows, length = group.batch_size, group.max_length or run.length
    passes = 3 if phase.name == "sft" else 4  # the PRM's forward and backward, and its reference's forward
    return [("update", rows, length, passes * forward_flops(run.cfg, rows, length))]


def rl_programs(run: Run, phase: Phase, fused: bool) -> list[tuple[str, int, int, int]]:
    """The same of RL, evaluation included."""
    c, cfg, T, N = run.config, run.cfg, run.length, run.config.sampling.max_new
    r, drawn, kept = c.rl, c.rl.prompts * c.rl.oversample, c.rl.prompts * c.rl.group
    one = forward_flops(cfg, kept, T, N)
    passes = 3 * r.epochs if phase.policy_tx is not None else 0
    passes += {"after": 3, "before": 4, "none": 1}[r.prm_order] if phase.has_prm else 0
    passes += phase.has_reference
    several = r.epochs * r.minibatches > 1 and r.old_logp == "recompute"
    passes += several or (r.kl_coef > 0 and r.kl_in == "reward")
    sampling, update = sample_flops(run, drawn, r.group), passes * one
    if fused:
        out = [("sample, verify, update", drawn * r.group, T, sampling + update)]
    else:
        out = [("sample", drawn * r.group, T, sampling), ("update", kept, T, update)]
    if c.eval.problems:
        size = -(-min(c.eval.batch, c.eval.problems) // run.row_shards) * run.row_shards
        groups = {max(c.eval.samples, c.eval.pass_k), *([c.eval.samples] if c.eval.every else [])}
        for name, group in (*((f"evaluate, {g} samples", g) for g in sorted(groups)), ("evaluate, greedy", 1)):
            out.append((name, size * group, T, sample_flops(run, size, group)))
    return out


def sample_flops(run: Run, prompts: int, group: int) -> int:
    """One prefill of the prompts, then every response to its full length."""
    M, N, rows = run.config.sampling.max_prompt, run.config.sampling.max_new, prompts * group
    decode = forward_flops(run.cfg, rows, M + N, N) - forward_flops(run.cfg, rows, M, 0)
    return forward_flops(run.cfg, prompts, M, 0) + decode


def trace(run: Run, phase: Phase, program: Program, state: TrainState) -> None:
    """Traces a phase's iteration on abstract values: every check inside the programs is made."""
    batch = program.batches.batch(0, program.per_iteration)
    rows, whole = sharding(run.mesh, ("rows",)), sharding(run.mesh, (None,))

    def shape(where):
        return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    if not isinstance(program, RLProgram):
        jax.eval_shape(
            program.step, state, Rows(*map(shape(rows), (batch.tokens, batch.lengths, batch.prompt_lengths, batch.labels)))
        )
        return
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    tokens, lengths, columns = jax.tree.map(shape(whole), (batch.tokens, batch.lengths, batch.columns))
    if program.rl.fused:
        jax.eval_shape(program.rl.whole, state, tokens, lengths, columns, seed)
        return
    samples = jax.eval_shape(program.rl.draw, state.policy.params, tokens, lengths, seed, state.step)
    R = samples.lengths.shape[0]
    outcome, known = (jax.ShapeDtypeStruct((R,), dtype) for dtype in (jnp.float32, bool))
    jax.eval_shape(program.rl.judged, state, samples, outcome, known)


# ------------------------------------------------------------------------------------------------ words


def mebi(size: int) -> str:
    return f"{size / 2**20:,.2f}"
