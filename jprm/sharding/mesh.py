"""The device mesh, and the checks that turn a wrong one into a sentence."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh

from jprm.errors import UserError

AXES = ("data", "fsdp", "tensor")


def mesh_shape(sizes: Mapping[str, int], devices: int) -> tuple[int, ...]:
    """Resolves the sizes of :data:`AXES`; one of them may be -1, "whatever is left".

    Raises:
      UserError: the product does not equal the number of devices.

    Example:
      >>> mesh_shape({"data": 2, "fsdp": -1, "tensor": 1}, devices=8)
      (2, 4, 1)
    """
    shape = [int(sizes[a]) for a in AXES]
    asked = ", ".join(f"{a}={s}" for a, s in zip(AXES, shape))
    known = math.prod(s for s in shape if s != -1)
    if shape.count(-1) == 1 and known > 0 and devices % known == 0:
        shape[shape.index(-1)] = devices // known
    if min(shape) < 1 or math.prod(shape) != devices:
        raise UserError(
            f"{asked} on {devices} devices",
            expected=f"sizes whose product is {devices} (one of them may be -1)",
            where="config.mesh",
            fix="Set config.mesh.fsdp=-1 and the others so that they divide the device count",
        )
    return tuple(shape)


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """The mesh of a run over all devices, with automatic axes (see docs/decisions.md)."""
    shape = mesh_shape(sizes, jax.device_count())
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_divides(value: int, mesh: Mesh, axes: tuple[str, ...], *, what: str, where: str) -> None:
    """Raises a UserError unless ``value`` divides evenly over the product of the mesh ``axes``."""
    ways = math.prod(mesh.shape[a] for a in axes)
    if value % ways:
        names = " x ".join(axes)
        raise UserError(
            f"{what} = {value} over {names} = {ways}",
            expected=f"a multiple of {ways}",
            where=where,
            fix=f"Set {where} to {max(ways, value // ways * ways)}, or make config.mesh.{axes[-1]} smaller",
        )
