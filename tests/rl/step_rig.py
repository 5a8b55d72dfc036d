"""The compiled step on a tiny model and four prompts, for the tests of it: what goes in, and how two results are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jprm.model.config import ModelConfig
from jprm.model.spec import init_params
from jprm.rl.compositions import build_advantage
from jprm.rl.learner import Learner
from jprm.rl.rollouts import Rollouts, window
from jprm.rl.step import Batch, StepSpec, make_step, response_logps

CFG = ModelConfig(vocab_size=19, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
N, P, G = 6, 4, 4
BETA, CLIP = 0.5, 0.2
TX = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)  # a rate in the state: another rate is no other program
ADVANTAGE = dict(process_weight=1.0, scale_floor=1e-3, contrast_only=True, whiten=True)
OUTCOME_ONLY = dict(whiten=True)
# right answers per prompt: mixed, mixed, all right, mixed, all wrong, mixed; the first four are the batch, all six an
# oversampled one
OUTCOMES = np.array([[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]], np.float32)


@functools.cache
def params(seed=0):
    """Peaked enough that log-probs differ from token to token."""
    return jax.tree.map(lambda p: 6 * p if p.ndim > 1 else p, jax.jit(init_params, static_argnums=0)(CFG, jax.random.key(seed)))


@functools.partial(jax.jit, static_argnums=(2,))
def logps(params, rollouts, size=N):
    """[R, N] log-probs of the response tokens."""
    batch = Batch(
        rollouts.tokens, rollouts.prompt_lengths, window(rollouts.tokens, rollouts.prompt_lengths, size), rollouts.action
    )
    return response_logps(params, CFG, batch)[0]


@functools.cache
def rollouts(prompts=(0, 1, 2, 3), seed=0) -> Rollouts:
    """Prompts of 1 to 4 tokens, responses of 1 to 6, drawn per prompt; the behaviour log-probs are the policy's own."""
    rows = [(p, g) for p in prompts for g in range(G)]
    lengths, prompt_lengths = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
    tokens = np.zeros((len(rows), 4 + N), np.int32)
    for r, (p, g) in enumerate(rows):
        of_prompt, of_row = np.random.default_rng([seed, p]), np.random.default_rng([seed, p, g])
        prompt_lengths[r] = n = of_prompt.integers(1, 5)
        tokens[r, :n] = of_prompt.integers(1, 19, n)
        lengths[r] = n + of_row.integers(1, N + 1)
        tokens[r, n : lengths[r]] = of_row.integers(1, 19, lengths[r] - n)
    at = np.arange(4 + N)
    action = (at >= prompt_lengths[:, None]) & (at < lengths[:, None])
    step = np.where(action, (at - prompt_lengths[:, None]) // 2, -1)
    ones = np.ones(len(rows), bool)
    found = Rollouts(
        *map(
            jnp.asarray,
            (
                tokens,
                lengths,
                prompt_lengths,
                action,
                step.astype(np.int32),
                np.where(action, 0, -1),
                np.zeros(action.shape, np.float32),
                OUTCOMES[list(prompts)].ravel(),
                ones,
                ones,
            ),
        ),
        columns={},
        group=G,
    )
    logp = jnp.pad(logps(params(), found), ((0, 0), (0, 4)))  # from the window to positions
    index = jnp.maximum(jnp.arange(4 + N) - found.prompt_lengths[:, None], 0)
    return found.replace(behavior_logp=jnp.where(found.action, jnp.take_along_axis(logp, index, axis=1), 0.0))


def learner(seed=0, lr=1e-2):
    state = TX.init(params(seed))
    state.hyperparams["learning_rate"] = jnp.float32(lr)
    return Learner(params(seed), state)


@functools.cache
def program(spec=(), advantage=tuple(ADVANTAGE.items()), prm=True):
    form = StepSpec(**{"window": N, "prompts": P, "beta": BETA, "clip": (CLIP, CLIP), **dict(spec)})
    return jax.jit(make_step(CFG, form, build_advantage(**dict(advantage)), TX, TX if prm else None))


def step(spec={}, *, policy=None, prm=None, reference=None, batch=None, learn=True):
    """(policy, prm, ok, metrics, trace) of PRIME with these departures from the default step."""
    return program(tuple(spec.items()))(
        policy or learner(),
        prm or learner(),
        params() if reference is None else reference,
        rollouts() if batch is None else batch,
        jnp.bool_(learn),
    )


def same(a, b, **tolerance):
    """Every leaf equal, to the bit unless a tolerance is given; NaN equals NaN."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **({"rtol": 0} | tolerance))


def moved(a, b):
    return any(bool((x != y).any()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def counts(role: Learner):
    return {
        int(x) for p, x in jax.tree_util.tree_flatten_with_path(role.opt_state)[0] if jax.tree_util.keystr(p).endswith("count")
    }


def mu(role: Learner):
    """Adam's first moment: after one update, a tenth of the gradient (the parameters themselves only show its sign)."""
    return role.opt_state.inner_state[0].mu


def spoilt(tree):
    """One NaN in one matrix."""
    return {**tree, "final_norm": tree["final_norm"].at[3].set(jnp.nan)}
