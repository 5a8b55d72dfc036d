"""Logical axes -> mesh axes: the one table that says how anything is sharded."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Parameters name their dimensions by what they mean; this table alone knows the mesh.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ("data", "fsdp"),  # rollouts, training rows: the unit of parallelism
    "vocab": "tensor",
    "embed": "fsdp",  # model width: ZeRO-3 shards every matrix here
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "norm": None,  # vectors of D floats: replicating them is cheaper than gathering them
    "layers": None,
    "head_dim": None,
}

Axes = Sequence[str | None]


def spec(axes: Axes) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions carry these logical names (None: replicated)."""
    return PartitionSpec(*(None if a is None else RULES[a] for a in axes))


def sharding(mesh: Mesh, axes: Axes) -> NamedSharding:
    return NamedSharding(mesh, spec(axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """``with_sharding_constraint`` by logical axes; the identity where no mesh is set (a script, a unit test)."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))
