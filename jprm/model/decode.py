"""Decoding: four primitives over one state, and `sample` on them.

``prefill`` reads prompts, ``extend`` appends tokens (any number per row), ``fork`` copies rows, ``step`` feeds each row's last
token and draws the next. Sampling, trees, labellers, search and agents are loops over these.

The cache holds one array per layer, `[R, S, K, Dh]`, slot = position, written in place inside the loop that carries it.
(One stacked array would be sliced, hence copied, by every layer of every step: docs/decisions.md.)
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from jprm.model.config import ModelConfig
from jprm.model.forward import attention, block, cast_params, embed, forward, logits, rms_norm, rope_tables
from jprm.model.sampling import Sampling, draw, log_distribution
from jprm.model.spec import Params
from jprm.sharding.rules import constrain


@flax.struct.dataclass
class DecodeState:
    """Where R rows stand.

    Attributes:
      keys, values: one dtype[R, S, K, Dh] per layer; slots at and beyond ``lengths`` hold nothing that is ever read.
      lengths: i32[R] tokens read so far.
      hidden: dtype[R, D] final hidden state of the last token read: it predicts the next.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array
    hidden: jax.Array

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]


@flax.struct.dataclass
class Samples:
    """R = P x group sampled rows, prompt-major.

    Attributes:
      tokens: i32[R, T] prompt, then response, then zeros; T = prompt width + max_new.
      prompt_lengths, lengths: i32[R] tokens of the prompt, and of prompt + response (stop token included).
      logp: f32[R, T] at each response token: its log-probability under the distribution it was drawn from; 0 elsewhere.
      stopped: bool[R] ended with a stop token (False: cut by ``max_new``).
    """

    tokens: jax.Array
    prompt_lengths: jax.Array
    lengths: jax.Array
    logp: jax.Array
    stopped: jax.Array


def _layers(params: Params, cfg: ModelConfig) -> list[Params]:
    """One tree per layer. Inside a loop these slices are loop-invariant: XLA takes them once."""
    return [jax.tree.map(lambda p: p[i], params["layers"]) for i in range(cfg.num_layers)]


def prefill(
    params: Params, cfg: ModelConfig, tokens_RxN: jax.Array, lengths_R: jax.Array, *, capacity: int | None = None
) -> DecodeState:
    """Reads whole prompts (right-padded, each of at least one token) into a cache of ``capacity`` slots (default: N)."""
    R, N = tokens_RxN.shape
    out = forward(params, cfg, tokens_RxN, keep_keys=True)
    last = jnp.take_along_axis(out.hidden, (lengths_R - 1)[:, None, None], axis=1)[:, 0]

    def cache(kept_LxRxNxKxDh: jax.Array) -> tuple[jax.Array, ...]:
        room = ((0, 0), (0, (capacity or N) - N), (0, 0), (0, 0))
        return tuple(constrain(jnp.pad(kept_LxRxNxKxDh[i], room), "rows", None, "kv_heads", None) for i in range(cfg.num_layers))

    assert out.keys is not None and out.values is not None
    return DecodeState(cache(out.keys), cache(out.values), lengths_R.astype(jnp.int32), last)


def extend(params: Params, cfg: ModelConfig, state: DecodeState, tokens_RxN: jax.Array, counts_R: jax.Array) -> DecodeState:
    """Appends the first ``counts`` (0..N) tokens of each row; a row with count 0 stays exactly as it was."""
    params = cast_params(params, cfg)
    R, N = tokens_RxN.shape
    position_RxN = state.lengths[:, None] + jnp.arange(N)
    rope = rope_tables(position_RxN, cfg)
    mask_RxNxS = jnp.arange(state.capacity)[None, None] <= position_RxN[..., None]
    slot_RxN = jnp.where(jnp.arange(N) < counts_R[:, None], position_RxN, state.capacity)  # out of range: dropped
    row_Rx1 = jnp.arange(R)[:, None]
    keys, values = list(state.keys), list(state.values)

    def attend_layer(i):
        def attend(q, k, v):
            keys[i] = keys[i].at[row_Rx1, slot_RxN].set(k, mode="drop", unique_indices=True)
            values[i] = values[i].at[row_Rx1, slot_RxN].set(v, mode="drop", unique_indices=True)
            return attention(q, keys[i], values[i], mask_RxNxS)

        return attend

    x_RxNxD = constrain(embed(params, tokens_RxN), "rows", None, None)
    for i, layer in enumerate(_layers(params, cfg)):
        x_RxNxD = block(layer, cfg, x_RxNxD, rope, attend_layer(i))
    hidden = rms_norm(x_RxNxD, params["final_norm"], cfg.rms_norm_eps)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts_R - 1, 0)[:, None, None], axis=1)[:, 0]
    return DecodeState(
        tuple(keys),
        tuple(values),
        state.lengths + counts_R.astype(jnp.int32),
        jnp.where(counts_R[:, None] > 0, last, state.hidden),
    )


def fork(state: DecodeState, parent_R: jax.Array, *, capacity: int | None = None) -> DecodeState:
    """Row r of the result continues row ``parent[r]`` of ``state``, with room for ``capacity`` tokens (default: unchanged)."""
    room = ((0, 0), (0, (capacity or state.capacity) - state.capacity), (0, 0), (0, 0))
    copy = lambda x: constrain(jnp.pad(x[parent_R], room), "rows", None, "kv_heads", None)
    return DecodeState(
        tuple(map(copy, state.keys)), tuple(map(copy, state.values)), state.lengths[parent_R], state.hidden[parent_R]
    )


def choose(
    params: Params, cfg: ModelConfig, state: DecodeState, keys_R: jax.Array, n: jax.Array | int, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Draws every row's response token number ``n``: (i32[R], its log-probability f32[R])."""
    log_p_RxV = log_distribution(logits(params, cfg, state.hidden), sampling, stop_allowed=n >= sampling.min_new)
    log_p_RxV = constrain(log_p_RxV, "rows", None)
    if sampling.temperature == 0:
        token_R = jnp.argmax(log_p_RxV, axis=-1).astype(jnp.int32)
    else:
        uniform_R = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, n)))(keys_R)
        token_R = draw(log_p_RxV, uniform_R)
    return token_R, jnp.take_along_axis(log_p_RxV, token_R[:, None], axis=-1)[:, 0]


def step(
    params: Params,
    cfg: ModelConfig,
    state: DecodeState,
    token_R: jax.Array,
    alive_R: jax.Array,
    keys_R: jax.Array,
    n: jax.Array | int,
    sampling: Sampling,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Feeds each living row's last token and draws its ``n``-th: (state, token i32[R], logp f32[R])."""
    state = extend(params, cfg, state, token_R[:, None], alive_R.astype(jnp.int32))
    return state, *choose(params, cfg, state, keys_R, n, sampling)


def sample(
    params: Params,
    cfg: ModelConfig,
    prompts_PxN: jax.Array,
    prompt_lengths_P: jax.Array,
    keys_R: jax.Array,
    *,
    group: int,
    sampling: Sampling,
) -> Samples:
    """Draws ``group`` responses to every prompt: one prefill of P rows, then one ``while_loop`` that ends with the last living
    row.

    Args:
      params: any float dtype; cast once, outside the loop.
      cfg: the model's shape (static).
      prompts_PxN: i32[P, N] right-padded.
      prompt_lengths_P: i32[P], each at least 1.
      keys_R: typed keys [P x group], see :func:`jprm.model.sampling.row_keys`.
      group: G samples per prompt (static).
      sampling: static.

    Returns:
      :class:`Samples`.
    """
    P, N = prompts_PxN.shape
    R, M = P * group, sampling.max_new
    params = cast_params(params, cfg)
    with jax.named_scope("prefill"):
        state = prefill(params, cfg, prompts_PxN, prompt_lengths_P)
        state = fork(state, jnp.arange(R) // group, capacity=N + M)
    prompts_RxN, prompt_lengths_R = (
        jnp.repeat(prompts_PxN, group, axis=0),
        jnp.repeat(prompt_lengths_P, group, axis=0).astype(jnp.int32),
    )
    is_stop = lambda token: functools.reduce(
        jnp.logical_or, [token == s for s in sampling.stop_ids], jnp.zeros(token.shape, bool)
    )

    def record(out, n, token, logp, alive):
        tokens_RxM, logp_RxM, count_R = out
        tokens_RxM = jax.lax.dynamic_update_slice(tokens_RxM, jnp.where(alive, token, 0)[:, None], (0, n))
        logp_RxM = jax.lax.dynamic_update_slice(logp_RxM, jnp.where(alive, logp, 0.0)[:, None], (0, n))
        return tokens_RxM, logp_RxM, count_R + alive

    def body(carry):
        n, state, token, alive, out = carry
        state, token, logp = step(params, cfg, state, token, alive, keys_R, n, sampling)
        out = record(out, n, token, logp, alive)
        return n + 1, state, token, alive & ~is_stop(token), out

    everyone = jnp.ones(R, bool)
    token, logp = choose(params, cfg, state, keys_R, 0, sampling)
    out = record((jnp.zeros((R, M), jnp.int32), jnp.zeros((R, M)), jnp.zeros(R, jnp.int32)), 0, token, logp, everyone)
    carry = (jnp.int32(1), state, token, ~is_stop(token), out)
    with jax.named_scope("decode"):
        *_, alive, (tokens_RxM, logp_RxM, count_R) = jax.lax.while_loop(lambda c: (c[0] < M) & jnp.any(c[3]), body, carry)

    # The response moves up against its own prompt: row r's n-th token goes to position prompt_length[r] + n.
    row_Rx1, slot_RxM = jnp.arange(R)[:, None], prompt_lengths_R[:, None] + jnp.arange(M)
    prompt_only = jnp.where(jnp.arange(N) < prompt_lengths_R[:, None], prompts_RxN, 0)
    tokens = jnp.zeros((R, N + M), jnp.int32).at[:, :N].set(prompt_only).at[row_Rx1, slot_RxM].set(tokens_RxM)
    return Samples(
        tokens=constrain(tokens, "rows", None),
        prompt_lengths=prompt_lengths_R,
        lengths=prompt_lengths_R + count_R,
        logp=jnp.zeros((R, N + M)).at[row_Rx1, slot_RxM].set(logp_RxM),
        stopped=~alive,
    )
