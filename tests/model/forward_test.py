"""What the layers' own gradients compute, what they keep for it, and what the lookup of embeddings moves between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprm.model.dense import dense
from jprm.model.forward import embed, gated
from jprm.sharding.mesh import make_mesh
from jprm.sharding.rules import constrain, sharding

R, T, D, F = 2, 12, 16, 64


@pytest.mark.parametrize("width, out", [(6, (4,)), (4, (6,)), (4, (2, 3)), (8, (2, 2)), (1, (1,))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_is_a_matrix_product_with_its_gradients(width, out, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (jax.random.normal(k, s, dtype) for k, s in zip(keys, [(2, 3, width), (width, *out), (2, 3, *out)]))
    y, back = jax.vjp(dense, x, w)
    wide = lambda a: np.asarray(a, np.float64)
    flat_w, flat_g = wide(w).reshape(width, -1), wide(g).reshape(2, 3, -1)
    atol = 1e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(wide(y).reshape(2, 3, -1), wide(x) @ flat_w, atol=atol)
    dx, dw = back(g)
    np.testing.assert_allclose(wide(dx), flat_g @ flat_w.T, atol=atol)
    np.testing.assert_allclose(wide(dw).reshape(width, -1), np.einsum("rtd,rtf->df", wide(x), flat_g), atol=2 * atol)
    assert y.dtype == dx.dtype == dw.dtype == dtype


def mlp_arguments():
    shapes = [(R, T, D), (D, F), (D, F), (F, D)]
    return [jax.random.normal(k, s) for k, s in zip(jax.random.split(jax.random.key(0), 4), shapes)]


def mlp(x, gate, up, down):
    return gated(dense(x, gate), dense(x, up), down)


def plain_mlp(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def test_gated_is_what_it_says():
    arguments = mlp_arguments()
    ours, theirs = (jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2, 3))(*arguments) for f in (mlp, plain_mlp))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)


def test_the_backward_pass_keeps_two_wide_arrays():
    def wide(f):
        return sum(x.shape == (R, T, F) for x in jax.tree.leaves(jax.vjp(f, *mlp_arguments())[1]))

    assert wide(mlp) == 2 and wide(plain_mlp) > 2


def test_no_wide_array_is_transposed():
    """Its strided copy took as long as the product it was for."""

    def transposed(f):
        text = jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2, 3))).lower(*mlp_arguments()).compile().as_text()
        return f"f32[{F},{R * T}]" in text

    assert not transposed(mlp) and transposed(plain_mlp)


@pytest.fixture
def nothing_is_kept():
    """Programs compiled here stay out of the persistent cache: one taken from there is not partitioned again."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def test_looked_up_rows_are_never_replicated(capfd, nothing_is_kept):
    """A table sharded by width, looked up as it lies, gives rows sharded by width, which XLA replicates to shard them by row."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})

    def complaints(lookup):
        with jax.set_mesh(mesh):
            table = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding(mesh, ("vocab", "embed")))
            tokens = jax.ShapeDtypeStruct((16, 24), jnp.int32, sharding=sharding(mesh, ("rows", None)))
            rows = lambda e, t: jnp.sin(constrain(lookup(e, t), "rows", None, None)).sum()
            jax.jit(jax.value_and_grad(rows)).lower(table, tokens).compile()
        return "Involuntary full rematerialization" in capfd.readouterr().err

    assert not complaints(lambda e, t: embed({"embed": e}, t))
    assert complaints(lambda e, t: e[t])
