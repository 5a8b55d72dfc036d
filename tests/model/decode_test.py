"""Decoding: the sampler against full forward passes, its four primitives, and what one draw may return."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jprm.errors import UserError
from jprm.model import decode
from jprm.model.config import ModelConfig
from jprm.model.decode import Samples, extend, fork, prefill, sample
from jprm.model.forward import forward, logits
from jprm.model.logps import token_logps
from jprm.model.sampling import Sampling, draw, log_distribution, row_keys
from jprm.model.spec import init_params

CFG = ModelConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
# far from uniform
PARAMS = jax.tree.map(lambda p: 8 * p if p.ndim > 1 else p, jax.jit(init_params, static_argnums=0)(CFG, jax.random.key(0)))
LENGTHS = jnp.array([5, 1, 3])
PROMPTS = jnp.where(jnp.arange(5) < LENGTHS[:, None], jax.random.randint(jax.random.key(1), (3, 5), 1, 20), 0)
GROUP, NEW = 4, 7
STOP = (4, 9)
full_forward = jax.jit(lambda tokens: logits(PARAMS, CFG, forward(PARAMS, CFG, tokens).hidden))
read_prompts = jax.jit(lambda tokens, lengths: prefill(PARAMS, CFG, tokens, lengths, capacity=8))
append = jax.jit(lambda state, tokens, counts: extend(PARAMS, CFG, state, tokens, counts))


@functools.partial(jax.jit, static_argnames=("group", "sampling"))
def run(prompts, lengths, keys, group, sampling):
    return sample(PARAMS, CFG, prompts, lengths, keys, group=group, sampling=sampling)


def drawn(group=GROUP, seed=0, prompts=PROMPTS, lengths=LENGTHS, **kwargs) -> Samples:
    return run(prompts, lengths, row_keys(seed, 0, len(lengths) * group), group, Sampling(**{"max_new": NEW, **kwargs}))


@functools.partial(jax.jit, static_argnums=1)
def logps_of(s: Samples, temperature=1.0):
    """[R, T] log-probs by the training path, at each position about that position's token."""
    hidden = forward(PARAMS, CFG, s.tokens).hidden[:, :-1]
    return jnp.pad(token_logps(PARAMS, CFG, hidden, s.tokens[:, 1:], temperature=temperature)[0], ((0, 0), (1, 0)))


def response(s: Samples):
    at = np.arange(s.tokens.shape[1])
    return (at >= np.asarray(s.prompt_lengths)[:, None]) & (at < np.asarray(s.lengths)[:, None])


# ------------------------------------------------------------------------------------------------ sample


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_trainer(temperature):
    s = drawn(temperature=temperature, stop_ids=STOP)
    mask = response(s)
    np.testing.assert_allclose(np.asarray(s.logp)[mask], np.asarray(logps_of(s, temperature))[mask], atol=1e-4)
    assert (np.asarray(s.logp)[~mask] == 0).all()


@pytest.mark.parametrize("cut", [dict(top_p=0.8), dict(top_k=5, top_p=0.6, temperature=0.7)], ids=str)
def test_log_probs_are_those_of_the_truncated_distribution(cut):
    """Against the definition in numpy: temperature, k most likely, smallest set that reaches p, then 1/Z over what is left."""
    s = drawn(**cut)
    z = np.asarray(full_forward(s.tokens), np.float64) / cut.get("temperature", 1.0)
    for r in range(len(s.lengths)):
        for t in range(int(s.prompt_lengths[r]), int(s.lengths[r])):
            p = np.exp(z[r, t - 1] - z[r, t - 1].max())
            order = np.argsort(-p)[: cut.get("top_k", CFG.vocab_size)]
            mass = p[order] / p[order].sum()
            kept = order[np.cumsum(mass) - mass < cut.get("top_p", 1.0)]
            assert int(s.tokens[r, t]) in kept
            np.testing.assert_allclose(float(s.logp[r, t]), np.log(p[s.tokens[r, t]] / p[kept].sum()), atol=1e-4)


def test_greedy_is_the_argmax_of_full_forward_passes():
    s = drawn(group=1, temperature=0.0)
    for r in range(3):
        tokens = PROMPTS[r : r + 1, : int(LENGTHS[r])]
        for _ in range(NEW):
            padded = jnp.pad(tokens, ((0, 0), (0, s.tokens.shape[1] - tokens.shape[1])))
            best = jnp.argmax(full_forward(padded)[:, tokens.shape[1] - 1], axis=-1)
            tokens = jnp.concatenate([tokens, best[:, None].astype(tokens.dtype)], axis=1)
        assert s.tokens[r, : int(s.lengths[r])].tolist() == tokens[0].tolist()
    assert not s.logp.any() and not s.stopped.any()


def test_a_row_is_the_same_alone_and_in_a_batch():
    """Prompt lengths, neighbours, padding and group position change neither the noise nor the result."""
    together, keys = drawn(stop_ids=STOP), row_keys(0, 0, 3 * GROUP)
    for r in range(3 * GROUP):
        p = r // GROUP
        alone = run(PROMPTS[p : p + 1], LENGTHS[p : p + 1], keys[r : r + 1], 1, Sampling(max_new=NEW, stop_ids=STOP))
        end = int(together.lengths[r])
        assert int(alone.lengths[0]) == end
        assert alone.tokens[0, :end].tolist() == together.tokens[r, :end].tolist()
        np.testing.assert_allclose(alone.logp[0, :end], together.logp[r, :end], atol=1e-5)


def test_a_group_shares_one_prefill(monkeypatch):
    shapes = []
    prefill_once = decode.prefill
    monkeypatch.setattr(
        decode, "prefill", lambda p, c, tokens, *a, **k: shapes.append(tokens.shape) or prefill_once(p, c, tokens, *a, **k)
    )
    s = jax.eval_shape(
        lambda k: sample(PARAMS, CFG, PROMPTS, LENGTHS, k, group=4, sampling=Sampling(max_new=3)), row_keys(0, 0, 12)
    )
    assert shapes == [(3, 5)] and s.tokens.shape == (12, 8)
    found = drawn(stop_ids=STOP)
    assert (found.tokens.reshape(3, 4, -1)[:, :, :5] * (jnp.arange(5) < LENGTHS[:, None, None]) == PROMPTS[:, None]).all()
    assert len({tuple(row) for row in found.tokens[:4].tolist()}) > 1  # their noise differs


def test_same_key_same_response_other_key_another():
    one = drawn(stop_ids=STOP).tokens
    assert (one == drawn(stop_ids=STOP).tokens).all() and not (one == drawn(seed=1, stop_ids=STOP).tokens).all()
    keys = [jax.random.key_data(row_keys(seed, iteration, 6)) for seed, iteration in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(k) for k in jnp.concatenate(keys).tolist()}) == 18


# ------------------------------------------------------------------------------------------------ where a response ends


@pytest.mark.parametrize("stop_ids", [STOP, (0,)], ids=["two", "pad"])
def test_a_response_ends_with_its_first_stop_token(stop_ids):
    """Also where the stop id is the padding id 0: lengths count tokens, nothing looks at their values."""
    s = drawn(temperature=1.5 if stop_ids == (0,) else 1.0, stop_ids=stop_ids)
    ends = 0
    for row, start, end, stopped in zip(s.tokens.tolist(), s.prompt_lengths, s.lengths, s.stopped):
        body = row[int(start) : int(end)]
        assert not set(body[:-1]) & set(stop_ids)
        assert bool(stopped) == (body[-1] in stop_ids) and (stopped or len(body) == NEW)
        assert not any(row[int(end) :])
        ends += stopped
    assert 0 < ends < len(s.lengths)


def test_a_prompt_may_hold_the_stop_id():
    prompts = jnp.array([[4, 4, 7, 0, 0]] * 3)
    s = drawn(prompts=prompts, lengths=jnp.array([3, 2, 1]), stop_ids=STOP)
    assert (s.prompt_lengths == jnp.array([3, 2, 1]).repeat(GROUP)).all() and (s.lengths > s.prompt_lengths).all()
    assert (s.tokens[:GROUP, :3] == prompts[:1, :3]).all()


def test_min_new_bans_early_stops_and_renormalises():
    everything = tuple(range(0, 20, 2))
    s = drawn(stop_ids=everything, min_new=3)
    assert (s.lengths - s.prompt_lengths).min() == 4  # tokens 0, 1 and 2 may not stop it, token 3 may
    row, start = 0, int(s.prompt_lengths[0])
    z = np.asarray(full_forward(s.tokens))[row, start - 1].astype(np.float64)
    odd = np.exp(z[1::2])
    np.testing.assert_allclose(float(s.logp[row, start]), np.log(np.exp(z[int(s.tokens[row, start])]) / odd.sum()), atol=1e-4)


def test_max_new_of_one():
    s = drawn(max_new=1)
    assert (s.lengths == s.prompt_lengths + 1).all() and s.tokens.shape == (3 * GROUP, 6)


def test_the_loop_ends_with_the_last_living_row(monkeypatch):
    calls = []
    step = decode.step

    def counted(*args):
        jax.debug.callback(lambda n: calls.append(int(n)), args[6])
        return step(*args)

    monkeypatch.setattr(decode, "step", counted)
    f = jax.jit(
        lambda k: sample(
            PARAMS, CFG, PROMPTS, LENGTHS, k, group=1, sampling=Sampling(max_new=50, stop_ids=(*STOP, *range(10, 17)))
        )
    )
    s = jax.block_until_ready(f(row_keys(0, 0, 3)))
    jax.effects_barrier()
    assert calls == list(range(1, int((s.lengths - s.prompt_lengths).max()))) and s.stopped.all()


# ------------------------------------------------------------------------------------------------ primitives


def same_state(a, b, rows=slice(None), to=slice(None), **tolerance):
    """Equal in everything that is ever read: slots below the length, lengths, the last hidden state."""
    np.testing.assert_array_equal(a.lengths[rows], b.lengths[to])
    np.testing.assert_allclose(a.hidden[rows], b.hidden[to], **tolerance)
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values)):
        size = min(x.shape[1], y.shape[1])
        read = (np.arange(size) < np.asarray(a.lengths[rows])[:, None])[..., None, None]
        np.testing.assert_allclose(np.where(read, x[rows][:, :size], 0), np.where(read, y[to][:, :size], 0), **tolerance)


@pytest.mark.parametrize("size", [1, 2])
def test_extending_in_chunks_is_prefilling_the_whole(size):
    state = read_prompts(PROMPTS[:, :1], jnp.ones(3, jnp.int32))
    for start in range(1, 5, size):
        state = append(state, PROMPTS[:, start : start + size], jnp.clip(LENGTHS - start, 0, size))
    same_state(state, read_prompts(PROMPTS, LENGTHS), rtol=1e-4, atol=1e-4)


def test_extending_by_nothing_leaves_a_row_as_it_was():
    state = read_prompts(PROMPTS, LENGTHS)
    after = append(state, jnp.full((3, 2), 7), jnp.array([0, 2, 0]))
    for r in (0, 2):
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state)):
            np.testing.assert_array_equal(a[r], b[r])
    assert int(after.lengths[1]) == 3 and not (after.hidden[1] == state.hidden[1]).all()


def test_fork_copies_rows_and_they_part():
    state = read_prompts(PROMPTS, LENGTHS)
    assert fork(state, jnp.array([1]), capacity=9).capacity == 9
    children = fork(state, jnp.array([2, 1, 2]))
    same_state(children, state, slice(None), jnp.array([2, 1, 2]))
    grown = append(children, jnp.array([[5, 0], [5, 6], [8, 0]]), jnp.array([1, 2, 1]))
    want = [[*PROMPTS[2, :3].tolist(), 5], [*PROMPTS[1, :1].tolist(), 5, 6], [*PROMPTS[2, :3].tolist(), 8]]
    padded = jnp.array([row + [0] * (5 - len(row)) for row in want])
    same_state(grown, read_prompts(padded, jnp.array([len(row) for row in want])), rtol=1e-4, atol=1e-4)


def test_bfloat16_caches_in_bfloat16():
    cfg = CFG.replace(dtype="bfloat16")
    state = jax.eval_shape(lambda: prefill(PARAMS, cfg, PROMPTS, LENGTHS, capacity=9))
    assert {x.dtype for x in (*state.keys, *state.values)} == {jnp.dtype("bfloat16")}
    s = jax.eval_shape(
        lambda k: sample(PARAMS, cfg, PROMPTS, LENGTHS, k, group=1, sampling=Sampling(max_new=2)), row_keys(0, 0, 3)
    )
    assert s.logp.dtype == jnp.float32


def test_the_cache_is_updated_in_place():
    """Growing the window grows the program's temporaries by the cache and by what attention reads of one layer: there is no
    second
    cache, as restacking it through the layer loop or a copy in the decoding loop would need."""
    rows, cfg = 8, CFG.replace(num_layers=3)
    params = jax.eval_shape(lambda k: init_params(cfg, k), jax.random.key(0))
    prompts, lengths, keys = jnp.ones((rows, 2), jnp.int32), jnp.full(rows, 2), row_keys(0, 0, rows)

    def temporaries(new):
        f = jax.jit(lambda p, k: sample(p, cfg, prompts, lengths, k, group=1, sampling=Sampling(max_new=new)))
        return f.lower(params, keys).compile().memory_analysis().temp_size_in_bytes

    small, large = 500, 2500
    layer = 2 * rows * (large - small) * cfg.num_kv_heads * cfg.head_dim * 4
    scores = rows * (large - small) * cfg.num_heads * 4  # attention of one layer to one token
    outputs = 2 * rows * (large - small) * 4  # tokens and log-probs
    growth, cache = temporaries(large) - temporaries(small), 3 * layer
    assert cache <= growth <= cache + layer + 2 * scores + 3 * outputs < 2 * cache


# ------------------------------------------------------------------------------------------------ one draw


def test_frequencies_are_the_probabilities():
    """Chi-square over a vocabulary of several blocks; 600 cells, 5-sigma bound, fixed noise."""
    V, n = 600, 60_000
    log_p = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (V,)))
    uniform = jax.random.uniform(jax.random.key(1), (n,))
    counts = np.bincount(jax.jit(lambda u: draw(jnp.broadcast_to(log_p, (n, V)), u, block=64))(uniform), minlength=V)
    expected = n * np.exp(np.asarray(log_p, np.float64))
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - (V - 1)) < 5 * np.sqrt(2 * (V - 1))


@settings(deadline=None, max_examples=100)
@given(
    hnp.arrays(np.float32, (1, 11), elements=st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.3, 1.0])),
    st.floats(0, 1, exclude_max=True, width=32),
)
def test_a_token_without_mass_is_never_drawn(mass, uniform):
    if not mass.any():
        mass[0, 3] = 1.0
    log_p = jnp.log(mass / mass.sum())
    token = int(draw(log_p, jnp.array([uniform]), block=4)[0])
    assert 0 <= token < 11 and mass[0, token] > 0


def test_sums_that_round_apart_reach_no_token_without_mass():
    """A block's mass, the total and the cumulative sums are added up in different orders; the tail of each row has no mass."""
    mass = jax.random.uniform(jax.random.key(2), (500, 600)) * (jnp.arange(600) < 500)
    token = jax.jit(lambda p: draw(jnp.log(p), jnp.full(500, np.nextafter(np.float32(1), np.float32(0))), block=4))(mass)
    assert token.max() < 500 and (jnp.take_along_axis(mass, token[:, None], axis=1) > 0).all()


@pytest.mark.parametrize("uniform, token", [(0.0, 1), (np.nextafter(np.float32(1), np.float32(0)), 9)])
def test_the_ends_of_the_unit_interval(uniform, token):
    mass = np.zeros((1, 11), np.float32)
    mass[0, [1, 9]] = 0.5
    assert int(draw(jnp.log(mass), jnp.array([uniform], jnp.float32), block=4)[0]) == token


def test_ties_with_the_last_kept_token_are_kept():
    z = jnp.array([[2.0, 1.0, 1.0, 0.0]])
    np.testing.assert_allclose(jnp.exp(log_distribution(z, Sampling(max_new=1, top_k=2)))[0, 3], 0)
    assert (log_distribution(z, Sampling(max_new=1, top_k=2))[0, 1:3] > -jnp.inf).all()


@pytest.mark.parametrize(
    "name, value",
    [("max_new", 0), ("min_new", -1), ("min_new", 9), ("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)],
)
def test_refuses_numbers_out_of_range(name, value):
    with pytest.raises(UserError) as error:
        Sampling(**{"max_new": 8, name: value})
    assert error.value.where == f"config.sampling.{name}" and str(value) in error.value.found
    assert error.value.expected and f"config.sampling.{name}" in error.value.fix
