"""The RL phase: its compiled programs, and one iteration of it.

Where the task verifies token ids on the device, sample -> verify -> step is one program. Elsewhere it is two, with the host's
verdict between them.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jprm.errors import UserError, one_of
from jprm.model.decode import Samples
from jprm.rl.compositions import build_advantage
from jprm.rl.kl import KINDS
from jprm.rl.policy_loss import AGGREGATIONS
from jprm.rl.rollouts import Rollouts
from jprm.rl.step import StepSpec, Trace, make_step
from jprm.train.prompts import PromptBatch, replicated
from jprm.train.rollout import device_verifier, make_sampler, to_rollouts, verify_on_host
from jprm.train.setup import Run, balanced, micro_batches
from jprm.train.state import Phase, TrainState, state_shardings

log = logging.getLogger(__name__)


def step_spec(run: Run) -> StepSpec:
    """The static numbers of the compiled step."""
    r, p = run.config.rl, run.config.prm
    rows = r.prompts * r.group
    one_of(r.prm_order, ("after", "before", "none"), where="config.rl.prm_order")
    one_of(r.prm_rows, ("kept", "all"), where="config.rl.prm_rows")
    one_of(r.old_logp, ("recompute", "behavior"), where="config.rl.old_logp")
    one_of(r.aggregation, AGGREGATIONS, where="config.rl.aggregation")
    one_of(r.kl_kind, KINDS, where="config.rl.kl_kind")
    one_of(r.kl_in, ("loss", "reward"), where="config.rl.kl_in")
    if 0 < r.dual_clip <= 1:
        raise UserError(
            f"{r.dual_clip}", expected="more than 1, or 0", where="config.rl.dual_clip", fix="Set config.rl.dual_clip=3.0"
        )
    return StepSpec(
        window=run.config.sampling.max_new,
        prompts=r.prompts,
        shards=run.row_shards,
        temperature=run.config.sampling.temperature or 1.0,
        band=(r.band_low, r.band_high),
        mask_uniform=r.mask_uniform,
        beta=p.beta,
        balance=balanced(run.config),
        prm_order=r.prm_order,
        prm_rows=r.prm_rows,
        prm_minibatches=r.prm_minibatches,
        epochs=r.epochs,
        minibatches=r.minibatches,
        micro_batches=micro_batches(rows // r.minibatches, r.micro_batch),
        prm_micro_batches=micro_batches(rows // r.prm_minibatches, r.micro_batch),
        old_logp=r.old_logp,
        clip=(r.clip_low, r.clip_high),
        dual_clip=r.dual_clip or None,
        aggregation=r.aggregation,
        kl_coef=r.kl_coef,
        kl_kind=r.kl_kind,
        kl_in=r.kl_in,
        entropy_coef=r.entropy_coef,
    )


def make_advantage(config: Any) -> Callable[..., tuple]:
    r = config.rl
    return build_advantage(
        estimator=r.estimator,
        outcome_weight=r.outcome_weight,
        outcome_gamma=r.outcome_gamma,
        ddof=r.ddof,
        eps=r.eps,
        process_weight=r.process_weight,
        process_credit=r.process_credit,
        process_gamma=r.process_gamma,
        formula=r.formula,
        granularity=r.granularity,
        accumulate=r.accumulate,
        process_scale=r.process_scale,
        scale_floor=r.scale_floor,
        contrast_only=r.mask_uniform,
        max_steps=config.prm.max_steps,
        whiten=r.whiten,
    )


class RLPhase:
    """Compiled programs of the RL phase; :meth:`iterate` is one iteration.

    Attributes:
      fused: the whole iteration is one program.
    """

    def __init__(self, run: Run, phase: Phase):
        self.run, self.phase, self.group = run, phase, run.config.rl.group
        if self.group == 1:
            text = "config.rl.group=1: every outcome has no other to be compared with, and advantage 0 (config.rl.estimator=%s)"
            log.warning(text, run.config.rl.estimator)
        learn = make_step(run.cfg, step_spec(run), make_advantage(run.config), phase.policy_tx, phase.prm_tx)
        draw = make_sampler(run, run.sampling, self.group)
        verifier = device_verifier(run)
        self.fused = verifier is not None
        warmup = phase.start + run.config.rl.prm_warmup

        def update(state: TrainState, rollouts: Rollouts) -> tuple[TrainState, jax.Array, dict, Trace]:
            policy, prm, ok, metrics, trace = learn(state.policy, state.prm, state.reference, rollouts, state.step >= warmup)
            return state.replace(policy=policy, prm=prm), ok, metrics, trace

        def whole(state: TrainState, tokens: jax.Array, lengths: jax.Array, columns: dict, seed: jax.Array):
            with jax.named_scope("sample"):
                s = draw(state.policy.params, tokens, lengths, seed, state.step)
            with jax.named_scope("verify"):
                rows = {k: jnp.repeat(v, self.group, axis=0) for k, v in columns.items()}
                outcome, known = verifier(s.tokens, s.prompt_lengths, s.lengths, rows)
            return advance(*update(state, to_rollouts(run, s, outcome, known, self.group)))

        def judged(state: TrainState, s: Samples, outcome: jax.Array, known: jax.Array):
            return advance(*update(state, to_rollouts(run, s, outcome, known, self.group)))

        self.draw = jax.jit(draw)
        where = state_shardings(phase, run.cfg, run.mesh)
        self.whole = jax.jit(whole, donate_argnums=0, out_shardings=(where, None, None))
        self.judged = jax.jit(judged, donate_argnums=0, out_shardings=(where, None, None))

    def iterate(self, state: TrainState, batch: PromptBatch) -> tuple[TrainState, dict[str, jax.Array], Trace, dict[str, float]]:
        """One iteration: (state, metrics on the device, trace, timings in seconds)."""
        seed = replicated(self.run, jnp.uint32(self.run.config.seed))
        if self.fused:
            state, metrics, trace = self.whole(state, batch.tokens, batch.lengths, batch.columns, seed)
            return state, metrics, trace, {}
        start = time.perf_counter()
        s = jax.block_until_ready(self.draw(state.policy.params, batch.tokens, batch.lengths, seed, state.step))
        sampled = time.perf_counter()
        judged = verify_on_host(self.run, batch, s, self.group)
        timings = {"timing_s/gen": sampled - start, "timing_s/verify": time.perf_counter() - sampled}
        state, metrics, trace = self.judged(state, *judged)
        return state, metrics, trace, timings


def advance(state: TrainState, ok: jax.Array, metrics: dict[str, jax.Array], *kept: Any) -> tuple:
    """Counts the iteration: ``step`` moves in any case, ``skipped`` counts non-finite ones in a row."""
    skipped = jnp.where(ok, 0, state.skipped + 1)
    return state.replace(step=state.step + 1, skipped=skipped), metrics | {"skipped_in_a_row": skipped.astype(jnp.float32)}, *kept
