"""The two phases that learn from rows on disk: SFT of the policy, and the offline implicit PRM."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jprm.model.config import ModelConfig
from jprm.model.forward import forward
from jprm.model.logps import token_logps
from jprm.reward import implicit
from jprm.rl.learner import apply, gradient, quotient, scan_rows
from jprm.train.state import Phase, TrainState


@flax.struct.dataclass
class Rows:
    """A training batch: i32[B, T] right-padded tokens, lengths, prompt lengths; labels f32[B], and the reference's log-probs
    f32[B, T-1] where they were computed before."""

    tokens: jax.Array
    lengths: jax.Array
    prompt_lengths: jax.Array
    labels: jax.Array
    reference_logps: jax.Array | None = None

    @property
    def mask(self) -> jax.Array:
        """bool[B, T-1]: entry t is about token t + 1; True on response tokens."""
        position = jnp.arange(1, self.tokens.shape[1])
        return (position >= self.prompt_lengths[:, None]) & (position < self.lengths[:, None])


def row_logps(params: Any, cfg: ModelConfig, rows: Rows) -> jax.Array:
    """f32[B, T-1] log-probability of every token after the first."""
    hidden = forward(params, cfg, rows.tokens).hidden[:, :-1]
    return token_logps(params, cfg, hidden, rows.tokens[:, 1:])[0]


def sft_loss(params: Any, cfg: ModelConfig, rows: Rows) -> tuple:
    """Negative log-likelihood of response tokens: (sum, tokens, metrics, ())."""
    mask = rows.mask
    total = -jnp.sum(jnp.where(mask, row_logps(params, cfg, rows), 0.0))
    return total, jnp.sum(mask, dtype=jnp.float32), {}, ()


def make_sft_step(cfg: ModelConfig, phase: Phase, micro_batches: int) -> Callable[..., tuple]:
    """``step(state, rows) -> (state, ok, metrics)``, to be jitted with the state donated."""

    def step(state: TrainState, rows: Rows):
        g = gradient(lambda p, r: sft_loss(p, cfg, r), state.policy.params, rows, micro_batches)
        policy, ok, stats = apply(phase.policy_tx, state.policy, g, jnp.bool_(True))
        return state.replace(policy=policy), ok, {f"sft/{k}": v for k, v in stats.items()} | {"sft/tokens": g.weight}

    return step


def make_prm_step(cfg: ModelConfig, phase: Phase, micro_batches: int, *, beta: float, balance: bool) -> Callable[..., tuple]:
    """``step(state, rows) -> (state, ok, metrics)`` of the implicit PRM: cross-entropy of labels under sigma(beta x log-ratio).

    Reference log-probs come with the rows, or are computed here: by the same function at the same shapes either way, so that a
    PRM equal to its reference scores exactly 0.
    """

    def step(state: TrainState, rows: Rows):
        reference = rows.reference_logps
        if reference is None:
            reference = scan_rows(lambda r: row_logps(state.reference, cfg, r), rows, micro_batches)
        usable = implicit.usable_rows(rows.mask, rows.labels, jnp.ones_like(rows.labels, bool))
        weight = implicit.balanced_weights(rows.labels, usable) if balance else jnp.ones_like(rows.labels)

        def loss(params, d):
            rows, reference, usable, weight = d
            q = implicit.log_ratio(row_logps(params, cfg, rows), reference, rows.mask)
            total = jax.lax.stop_gradient(implicit.outcome_rewards(q, rows.mask, 1.0))
            return *implicit.ce_loss(q, rows.mask, rows.labels, usable, beta=beta, row_weight=weight), total

        g = gradient(loss, state.prm.params, (rows, reference, usable, weight), micro_batches)
        prm, ok, stats = apply(phase.prm_tx, state.prm, g, jnp.bool_(True))
        sums = g.metrics | {"auc": implicit.auc(g.rows, rows.labels, usable)}
        stats |= {name: quotient(*sums[name]) for name in sums}
        return state.replace(prm=prm), ok, {f"prm/{k}": v for k, v in stats.items()}

    return step
