"""A small state with all that a run's has: parameters, an optimizer's, typed keys, several dtypes, an absent role."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    reference: dict | None
    key: jax.Array


def make_state(step: int, size: int = 64) -> State:
    params = {"w": jax.random.normal(jax.random.key(step), (size, size)), "norm": jnp.full((size,), step, jnp.bfloat16)}
    return State(
        step=jnp.int32(step), params=params, opt_state=optax.adam(1e-3).init(params), reference=None, key=jax.random.key(step + 1)
    )


def abstract(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
