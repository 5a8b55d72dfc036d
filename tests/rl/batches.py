"""Rollouts for the tests of ``rl/`` and ``reward/``: the golden batch, random ones, and what must not change them."""

import jax.numpy as jnp
import numpy as np

from jprm.rl.rollouts import Rollouts

# Golden batch: four responses to one prompt, of 3, 2, 4 and 1 tokens; q = log-ratio of each token.
GOLDEN_LENGTHS = np.array([3, 2, 4, 1])
GOLDEN_MASK = np.arange(4) < GOLDEN_LENGTHS[:, None]
GOLDEN_OUTCOME = np.array([1, 0, 1, 0], np.float32)
GOLDEN_Q = np.array([[0.2, -0.1, 0.3, 0], [0.5, 0.1, 0, 0], [-0.4, 0.2, -0.3, -0.1], [0.6, 0, 0, 0]], np.float32)


def make_rollouts(mask, outcome, group, *, step=None, prompt_length=0, known=None, valid=None, columns=None) -> Rollouts:
    """Rollouts of a mask bool[R, T] and an outcome f32[R]; each token is its own step unless told."""
    mask = np.asarray(mask, bool)
    rows, length = mask.shape
    if step is None:
        step = np.cumsum(mask, 1) - 1
    prompts = np.full(rows, prompt_length, np.int32)
    return Rollouts(
        tokens=jnp.zeros((rows, length), jnp.int32),
        lengths=jnp.asarray(prompts + mask.sum(1), jnp.int32),
        prompt_lengths=jnp.asarray(prompts),
        action=jnp.asarray(mask),
        step=jnp.asarray(np.where(mask, step, -1), jnp.int32),
        turn=jnp.asarray(np.where(mask, 0, -1), jnp.int32),
        behavior_logp=jnp.zeros((rows, length), jnp.float32),
        outcome=jnp.asarray(outcome, jnp.float32),
        known=jnp.ones(rows, bool) if known is None else jnp.asarray(known, bool),
        valid=jnp.ones(rows, bool) if valid is None else jnp.asarray(valid, bool),
        columns={} if columns is None else columns,
        group=group,
    )


def golden() -> Rollouts:
    return make_rollouts(GOLDEN_MASK, GOLDEN_OUTCOME, 4)


def random_rollouts(seed, prompts, group, length, max_steps=4, prompt_length=0):
    """``(rollouts, q f32[R, T], logp f32[R, T], mask)``: responses of 0 to T tokens, steps in order, some rows unknown, some
    filler.
    """
    rng = np.random.default_rng(seed)
    rows = prompts * group
    lengths = rng.integers(0, length - prompt_length + 1, rows)
    positions = np.arange(length) - prompt_length
    mask = (positions >= 0) & (positions < lengths[:, None])
    step = np.minimum(np.cumsum(mask & (rng.random(mask.shape) < 0.4), 1), max_steps - 1)
    rollouts = make_rollouts(
        mask,
        rng.integers(0, 2, rows),
        group,
        step=step,
        prompt_length=prompt_length,
        known=rng.random(rows) < 0.9,
        valid=rng.random(rows) < 0.9,
    )
    q = rng.normal(size=mask.shape).astype(np.float32)
    logp = -np.abs(rng.normal(size=mask.shape)).astype(np.float32)
    return rollouts, q, logp, mask


def pad(x, columns, fill):
    """``columns`` more positions on axis 1."""
    x = np.asarray(x)
    return jnp.asarray(np.concatenate([x, np.full((x.shape[0], columns), fill, x.dtype)], axis=1))


def pad_rollouts(rollouts: Rollouts, columns: int) -> Rollouts:
    """The same rollouts with garbage in ``columns`` more padding positions."""
    return rollouts.replace(
        tokens=pad(rollouts.tokens, columns, 7),
        action=pad(rollouts.action, columns, False),
        step=pad(rollouts.step, columns, -1),
        turn=pad(rollouts.turn, columns, -1),
        behavior_logp=pad(rollouts.behavior_logp, columns, np.nan),
    )


def spoil(x, mask):
    """``x`` with NaN and infinities off the mask."""
    garbage = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), np.shape(x))
    return jnp.asarray(np.where(mask, x, garbage))
