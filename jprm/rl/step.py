"""One compiled iteration of PRIME, or of outcome-only GRPO, which is the same step without the PRM.

    select    groups outside the accuracy band, and groups without contrast, leave every statistic
    score     log-probs of the reference, and of the policy where a later stage needs them before its own update
    PRM       log-ratios become token rewards; the PRM learns from the outcomes
    advantage whole batch, global statistics, no gradient
    policy    clipped updates: epochs x minibatches x micro-batches

Every array between the stages is over the response window [R, N]: index n is the n-th response token.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jprm.model.config import ModelConfig
from jprm.model.forward import forward
from jprm.model.logps import token_logps
from jprm.model.spec import Params
from jprm.reward import implicit
from jprm.rl.compositions import Advantage
from jprm.rl.kl import kl_loss, kl_rewards
from jprm.rl.learner import Learner, apply, cut, gradient, paste, quotient, scan_rows
from jprm.rl.policy_loss import policy_loss
from jprm.rl.rollouts import Rollouts, to_window
from jprm.rl.select import has_contrast, in_band, keep_prompts, take_prompts, to_rows
from jprm.sharding.rules import constrain

JUDGED = "judged"  # column: bool[R] rows with a verdict, whether or not their group was kept


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The numbers of one iteration (static). Names and meanings are those of ``config.rl`` and ``config.prm``."""

    window: int  # N, response tokens
    prompts: int  # P kept
    shards: int = 1  # row shards of the mesh
    temperature: float = 1.0
    band: tuple[float, float] = (0.0, 1.0)
    mask_uniform: bool = True
    beta: float = 0.05
    balance: bool = True
    prm_rows: str = "kept"
    prm_order: str = "after"
    prm_minibatches: int = 1
    epochs: int = 1
    minibatches: int = 1
    micro_batches: int = 1  # per minibatch
    prm_micro_batches: int = 1
    old_logp: str = "recompute"
    clip: tuple[float, float] = (0.2, 0.2)
    dual_clip: float | None = None
    aggregation: str = "token_mean"
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    kl_in: str = "loss"
    entropy_coef: float = 0.0

    @property
    def updates(self) -> int:
        """Policy updates of one iteration."""
        return self.epochs * self.minibatches


@flax.struct.dataclass
class Batch:
    """What both learners read of a row: the sequence, and the response window cut from it."""

    tokens: jax.Array  # i32[R, T]
    prompt_lengths: jax.Array  # i32[R]
    targets: jax.Array  # i32[R, N] response tokens
    mask: jax.Array  # bool[R, N] sampled tokens of valid rows


@flax.struct.dataclass
class Trace:
    """Per row and token, for people to look at: f32[R, N] each, and which rows they are."""

    rollouts: Rollouts  # of the response window, after selection
    token_rewards: jax.Array
    process_returns: jax.Array
    advantages: jax.Array


def response_logps(
    params: Params, cfg: ModelConfig, batch: Batch, temperatures: tuple[float, ...] = (1.0,)
) -> tuple[jax.Array, ...]:
    """Log-probs f32[R, N] of the response tokens, one array per temperature, then the entropy at the first: one forward pass.

    Only the hidden states that predict a response token (at ``prompt_length - 1 + n``) reach the vocabulary.
    """
    hidden = forward(params, cfg, batch.tokens).hidden
    at = batch.prompt_lengths[:, None] - 1 + jnp.arange(batch.targets.shape[1])
    hidden = jnp.take_along_axis(hidden, jnp.minimum(at, hidden.shape[1] - 1)[..., None], axis=1)
    pairs = [token_logps(params, cfg, constrain(hidden, "rows", None, None), batch.targets, temperature=t) for t in temperatures]
    return *(p[0] for p in pairs), pairs[0][1]


def make_step(
    cfg: ModelConfig,
    spec: StepSpec,
    advantage: Advantage,
    policy_tx: optax.GradientTransformation,
    prm_tx: optax.GradientTransformation | None,
) -> Callable[..., tuple]:
    """Builds ``step(policy, prm, reference, rollouts, learn_policy) -> (policy, prm, ok, metrics, trace)``.

    Pure; jit it with ``policy`` and ``prm`` donated. ``prm`` is None for outcome-only methods (then ``prm_tx`` is None), and
    ``reference`` (compute dtype, frozen) is None where neither a PRM nor a KL term reads it. ``learn_policy`` is a traced bool:
    False while only the PRM warms up. ``ok`` is False where a non-finite number stopped the iteration's updates.
    """

    def step(policy: Learner, prm: Learner | None, reference: Params | None, rollouts: Rollouts, learn_policy: jax.Array):
        with jax.named_scope("select"):
            rollouts, metrics = _select(rollouts, spec)
        rows = to_window(rollouts, spec.window)
        batch = Batch(rollouts.tokens, rollouts.prompt_lengths, rows.tokens, rows.token_mask)

        with jax.named_scope("score"):
            ref_logp, ref_logp_tempered, old_logp = _score(policy, reference, batch, prm is not None)

        ok, rewards = jnp.bool_(True), None
        if prm is not None:
            with jax.named_scope("prm"):
                prm, ok, q, stats = _prm_stage(prm, batch, rows, ref_logp, ok)
                metrics |= stats
                total, judged = implicit.outcome_rewards(q, rows.action, 1.0), rows.columns[JUDGED] & jnp.any(rows.action, axis=1)
                metrics["prm/auc"] = quotient(*implicit.auc(total, rows.outcome, judged))
                metrics["prm/pair_accuracy"] = quotient(*implicit.pair_accuracy(total, rows.outcome, judged, rows.group))
                rewards = implicit.token_rewards(q, rows.action, spec.beta)

        with jax.named_scope("advantage"):
            in_reward = None
            if spec.kl_coef and spec.kl_in == "reward":
                in_reward = kl_rewards(old_logp, ref_logp_tempered, batch.mask, coef=spec.kl_coef)
            advantages, returns, stats = advantage(rows, rewards, in_reward)
            metrics |= {k: v for k, v in stats.items() if k != "critic/score/mean"}

        with jax.named_scope("policy"):
            policy, ok, stats = _policy_stage(policy, batch, rows, advantages, old_logp, ref_logp_tempered, ok, learn_policy)
            metrics |= stats
        zeros = jnp.zeros_like(advantages)
        trace = Trace(rows, zeros if rewards is None else rewards, returns.get("process", zeros), advantages)
        return policy, prm, ok, metrics, jax.lax.stop_gradient(trace)

    # ---------------------------------------------------------------------------------------- score

    def _score(policy, reference, batch, with_prm):
        kl = spec.kl_coef > 0
        temperatures = ((1.0,) if with_prm else ()) + (
            (spec.temperature,) if kl and (spec.temperature != 1 or not with_prm) else ()
        )
        ref_logp = ref_tempered = old = None
        micro = spec.micro_batches * spec.minibatches
        if temperatures:
            *found, _ = scan_rows(lambda b: response_logps(reference, cfg, b, temperatures), batch, micro)
            ref_logp, ref_tempered = (found[0] if with_prm else None), (found[-1] if kl else None)
        if (spec.updates > 1 and spec.old_logp == "recompute") or (kl and spec.kl_in == "reward"):
            old, _ = scan_rows(lambda b: response_logps(policy.params, cfg, b, (spec.temperature,)), batch, micro)
        return ref_logp, ref_tempered, old

    # ---------------------------------------------------------------------------------------- PRM

    def _prm_stage(prm, batch, rows, ref_logp, ok):
        """Updates over minibatches; returns the log-ratios q f32[R, N] of *all* sampled tokens that become rewards."""
        usable = implicit.usable_rows(
            rows.action, rows.outcome, rows.columns[JUDGED] if spec.prm_rows == "all" else rows.labelled
        )
        weight = implicit.balanced_weights(rows.outcome, usable) if spec.balance else jnp.ones_like(rows.outcome)
        data = (batch, rows.action, rows.outcome, usable, weight, ref_logp)

        def loss(params, d):
            batch, action, outcome, usable, weight, ref_logp = d
            logp, _ = response_logps(params, cfg, batch)
            q = implicit.log_ratio(logp, ref_logp, action)
            return *implicit.ce_loss(q, action, outcome, usable, beta=spec.beta, row_weight=weight), jax.lax.stop_gradient(q)

        def score(d):
            batch, action, _, _, _, ref_logp = d
            return implicit.log_ratio(response_logps(prm.params, cfg, batch)[0], ref_logp, action)

        parts = spec.prm_minibatches * spec.prm_micro_batches
        if spec.prm_order == "none":
            return prm, ok, jax.lax.stop_gradient(scan_rows(score, data, parts)), {}

        def update(carry, d):
            prm, ok = carry
            g = gradient(loss, prm.params, d, spec.prm_micro_batches)
            prm, ok, stats = apply(prm_tx, prm, g, ok)
            return (prm, ok), (stats, g.metrics, g.rows)

        (prm, ok), (stats, sums, q) = _over_minibatches(update, (prm, ok), data, spec.prm_minibatches)
        if spec.prm_order == "before":
            q = jax.lax.stop_gradient(scan_rows(score, data, parts))
        else:
            q = paste(q)
        named = {f"prm/{k}": jnp.mean(v) for k, v in stats.items()}
        return prm, ok, q, named | {f"prm/{k}": quotient(jnp.sum(s), jnp.sum(w)) for k, (s, w) in sums.items()}

    # ---------------------------------------------------------------------------------------- policy

    def _policy_stage(policy, batch, rows, advantages, old_logp, ref_logp, ok, learn):
        if old_logp is None and spec.old_logp == "behavior":
            old_logp = rows.behavior_logp
        zeros = jnp.zeros_like(advantages)
        data = (
            batch,
            advantages,
            zeros if old_logp is None else old_logp,
            zeros if ref_logp is None else ref_logp,
            rows.behavior_logp,
        )

        def loss(params, d):
            batch, advantages, old, ref, behavior = d
            logp, entropy = response_logps(params, cfg, batch, (spec.temperature,))
            if old_logp is None:  # one update per rollout: the ratio is exactly 1
                old = jax.lax.stop_gradient(logp)
            form = dict(aggregation=spec.aggregation, constant=spec.window)
            total, weight, sums = policy_loss(
                logp,
                old,
                advantages,
                batch.mask,
                clip_low=spec.clip[0],
                clip_high=spec.clip[1],
                dual_clip=spec.dual_clip,
                entropy_RxT=entropy,
                entropy_coef=spec.entropy_coef,
                **form,
            )
            if ref_logp is not None:
                kl, _, kl_sums = kl_loss(logp, ref, batch.mask, kind=spec.kl_kind, **form)
                total, sums = total + (spec.kl_coef if spec.kl_in == "loss" else 0.0) * kl, sums | kl_sums
            drift = jnp.sum(jnp.where(batch.mask, jnp.abs(jax.lax.stop_gradient(logp) - behavior), 0.0))
            return total, weight, sums | {"sampler_drift": (drift, jnp.sum(batch.mask, dtype=jnp.float32))}, ()

        def update(carry, d):
            policy, ok = carry
            g = gradient(loss, policy.params, d, spec.micro_batches)
            policy, ok, stats = apply(policy_tx, policy, g, ok)
            return (policy, ok), (stats, g.metrics)

        def learn_fn(policy, ok):
            def epoch(carry, _):
                carry, kept = _over_minibatches(update, carry, data, spec.minibatches)
                return carry, kept

            if spec.epochs == 1:
                return epoch((policy, ok), None)
            return jax.lax.scan(epoch, (policy, ok), length=spec.epochs)

        idle = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(learn_fn, policy, ok)[1])
        (policy, ok), (stats, sums) = jax.lax.cond(learn, learn_fn, lambda policy, ok: ((policy, ok), idle), policy, ok)
        named = {f"actor/{k}": jnp.mean(v) for k, v in stats.items()}
        first = lambda x: x.reshape(-1)[0]  # before any update, the trainer must agree with the sampler
        drift = sums.pop("sampler_drift")
        named["actor/sampler_drift"] = quotient(first(drift[0]), first(drift[1]))
        return policy, ok, named | {f"actor/{k}": quotient(jnp.sum(s), jnp.sum(w)) for k, (s, w) in sums.items()}

    return step


def _over_minibatches(update: Callable, carry: Any, data: Any, parts: int) -> tuple[Any, Any]:
    """``lax.scan`` of ``update`` over strided minibatches; every kept leaf gets a leading axis of them, be it of length 1."""
    if parts > 1:
        return jax.lax.scan(update, carry, cut(data, parts))
    carry, kept = update(carry, data)
    return carry, jax.tree.map(lambda x: x[None], kept)


def _select(rollouts: Rollouts, spec: StepSpec) -> tuple[Rollouts, dict[str, jax.Array]]:
    """Keeps P prompts, those in the accuracy band first; groups outside it or without contrast are no longer ``valid``."""
    R = rollouts.tokens.shape[0]
    labelled, outcome = rollouts.labelled, rollouts.outcome
    known = jnp.sum(labelled, dtype=jnp.float32)
    lengths = (rollouts.lengths - rollouts.prompt_lengths).astype(jnp.float32)
    rows = jnp.sum(rollouts.valid, dtype=jnp.float32)
    metrics = {
        "critic/score/mean": quotient(jnp.sum(jnp.where(labelled, outcome, 0.0)), known),
        "critic/unknown": jnp.sum(rollouts.valid & ~labelled, dtype=jnp.float32),
        "response_length/mean": quotient(jnp.sum(jnp.where(rollouts.valid, lengths, 0.0)), rows),
        "response_length/clip_ratio": quotient(jnp.sum(rollouts.valid & (lengths >= spec.window), dtype=jnp.float32), rows),
        "response_length/empty": jnp.sum(rollouts.valid & (lengths == 0), dtype=jnp.float32),
    }
    passed = in_band(outcome, labelled, rollouts.group, *spec.band)
    if spec.mask_uniform:
        passed &= has_contrast(outcome, labelled, rollouts.group)
    rollouts = rollouts.replace(columns={**rollouts.columns, JUDGED: labelled})  # groups that teach nothing still test the PRM
    metrics["critic/kept_prompts"] = jnp.mean(passed.astype(jnp.float32))
    if R > spec.prompts * rollouts.group:
        index, passed = keep_prompts(passed, spec.prompts, spec.shards)
        rollouts = take_prompts(rollouts, index, rollouts.group)
    return rollouts.replace(valid=rollouts.valid & to_rows(passed, rollouts.group)), metrics
