"""Blocked token log-probs against the dense reference: values, gradients, memory, meshes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.model.config import ModelConfig
from jprm.model.logps import token_logps, token_logps_reference
from jprm.sharding.mesh import make_mesh
from jprm.sharding.rules import sharding

R, N, D = 4, 5, 16
# (vocabulary, chunk, temperature): not divisible, one row per block, one block, a chunk beyond the vocabulary, an even cut
CASES = [(101, 8, 1.0), (101, 50, 0.7), (7, 1, 0.7), (101, 101, 0.7), (101, 4096, 1.0), (96, 32, 1.0)]


def data(V, R=R, N=N, scale=1.0):
    keys = jax.random.split(jax.random.key(V), 4)
    hidden = scale * jax.random.normal(keys[0], (R, N, D))
    head = jax.random.normal(keys[1], (V, D)) * 0.5
    targets = jax.random.randint(keys[2], (R, N), 0, V).at[0, 0].set(V - 1)  # the last row, beside the padded tail
    return hidden, head, targets, jax.random.normal(keys[3], (R, N))


def blocked(head, hidden, targets, *, chunk, temperature=1.0, dtype="float32", tied=True):
    cfg = ModelConfig(vocab_size=head.shape[0], hidden_size=D, dtype=dtype, tie_word_embeddings=tied)
    return token_logps({"embed" if tied else "lm_head": head}, cfg, hidden, targets, temperature=temperature, chunk=chunk)


@pytest.mark.parametrize("V, chunk, temperature", CASES)
def test_equals_the_dense_reference(V, chunk, temperature):
    hidden, head, targets, weight = data(V)

    def loss(fn):
        def value(hidden, head):
            logp, entropy = fn(hidden, head)
            return jnp.sum(weight * logp), (logp, entropy)

        return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(hidden, head)

    (_, (logp, entropy)), ours = loss(lambda h, w: blocked(w, h, targets, chunk=chunk, temperature=temperature))
    (_, (logp_ref, entropy_ref)), theirs = loss(lambda h, w: token_logps_reference(h, w, targets, temperature))
    np.testing.assert_allclose(logp, logp_ref, atol=1e-5)
    np.testing.assert_allclose(entropy, entropy_ref, atol=1e-5)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert (logp <= 0).all() and logp.dtype == entropy.dtype == jnp.float32


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_never_positive_and_finite(scale):
    """Where the target takes all the mass, rounding must not make its log-prob positive, nor its gradient NaN."""
    hidden, head, _, _ = data(101, scale=scale)
    best = jnp.argmax(jnp.einsum("rnd,vd->rnv", hidden, head), axis=-1)
    logp, entropy = blocked(head, hidden, best, chunk=8)
    assert (logp <= 0).all() and jnp.isfinite(entropy).all()
    grads = jax.grad(lambda h, w: blocked(w, h, best, chunk=8)[0].sum(), argnums=(0, 1))(hidden, head)
    assert all(jnp.isfinite(g).all() for g in grads)


def test_one_way_to_compute_a_block_or_many():
    """Chunking is memory, not mathematics: every chunk gives the same numbers, under either name of the head."""
    hidden, head, targets, _ = data(101)
    whole = blocked(head, hidden, targets, chunk=101)
    for chunk, tied in ((1, True), (33, True), (8, False)):
        for a, b in zip(whole, blocked(head, hidden, targets, chunk=chunk, tied=tied)):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("chunk", [8, 4096])
def test_bf16_hidden(chunk):
    """bf16 in, fp32 logits: equal to the reference on the rounded values; gradients to bf16's own resolution."""
    hidden, head, targets, weight = data(101)
    hidden16, head16 = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    exact = [x.astype(jnp.float32) for x in (hidden16, head16)]
    logp, entropy = blocked(head16, hidden16, targets, chunk=chunk, dtype="bfloat16")
    logp_ref, entropy_ref = token_logps_reference(*exact, targets)
    np.testing.assert_allclose(logp, logp_ref, atol=1e-5)
    np.testing.assert_allclose(entropy, entropy_ref, atol=1e-5)
    ours = jax.grad(lambda h, w: (weight * blocked(w, h, targets, chunk=chunk, dtype="bfloat16")[0]).sum(), argnums=(0, 1))(
        hidden16, head16
    )
    theirs = jax.grad(lambda h, w: (weight * token_logps_reference(h, w, targets)[0]).sum(), argnums=(0, 1))(*exact)
    for a, b in zip(ours, theirs):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2**-8 * float(jnp.abs(b).max()) * 2)


def test_entropy_has_no_gradient():
    hidden, head, targets, _ = data(101)
    for chunk in (8, 101):
        grads = jax.grad(lambda h, w: blocked(w, h, targets, chunk=chunk)[1].sum(), argnums=(0, 1))(hidden, head)
        assert all((g == 0).all() for g in grads)


def test_no_array_of_rows_by_tokens_by_vocabulary():
    """Forward and backward compile to temporaries far below [R, N, V], and no such shape is in the program at all."""
    V, R, N, chunk = 4096, 8, 64, 256
    hidden, head, targets, weight = data(V, R, N)

    def loss(hidden, head):
        return (weight * blocked(head, hidden, targets, chunk=chunk)[0]).sum()

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(hidden, head).compile()
    dense = (
        jax.jit(jax.value_and_grad(lambda h, w: (weight * token_logps_reference(h, w, targets)[0]).sum(), argnums=(0, 1)))
        .lower(hidden, head)
        .compile()
    )
    whole = R * N * V * 4
    assert dense.memory_analysis().temp_size_in_bytes >= whole  # the measure sees it where it is
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 3
    largest = max(np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", compiled.as_text()))
    assert largest <= max(R * N * chunk, V * D)


@pytest.mark.parametrize("V, chunk", [(128, 32), (128, 512), (102, 16)])
def test_eight_devices(V, chunk):
    """data 2 x fsdp 2 x tensor 2, rows and vocabulary sharded: the same values and gradients."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    hidden, head, targets, weight = data(V)

    def loss(hidden, head, targets, weight):
        logp, entropy = blocked(head, hidden, targets, chunk=chunk)
        return (weight * logp).sum(), (logp, entropy)

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    wanted = jax.jit(step)(hidden, head, targets, weight)
    with jax.set_mesh(mesh):
        rows, placed = sharding(mesh, ("rows", None)), sharding(mesh, ("rows", None, None))
        got = jax.jit(step)(
            jax.device_put(hidden, placed),
            jax.device_put(head, sharding(mesh, ("vocab", "embed"))),
            jax.device_put(targets, rows),
            jax.device_put(weight, rows),
        )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(a, b, atol=1e-5)
