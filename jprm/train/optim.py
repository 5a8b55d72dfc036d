"""An optimizer from its config group, and shardings for its state."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jprm.errors import UserError, one_of
from jprm.model.config import ModelConfig
from jprm.model.spec import abstract_params, map_specs, param_shardings

SCHEDULES = ("constant", "cosine", "linear")


def learning_rate(group: Any, updates: int, where: str) -> optax.Schedule:
    """The learning rate per update: linear warm-up from 0 to ``lr``, then the schedule, to ``lr_end`` at the last of ``updates``.

    Raises:
      UserError: unknown schedule, or a warm-up as long as the phase.
    """
    one_of(group.schedule, SCHEDULES, where=f"{where}.schedule")
    if group.warmup and group.warmup >= updates:
        raise UserError(
            f"warmup {group.warmup} of {updates} updates",
            expected="a warm-up shorter than the phase",
            where=f"{where}.warmup",
            fix=f"Set {where}.warmup={max(0, updates // 10)}",
        )
    rest = max(updates - group.warmup, 1)
    after = {
        "constant": lambda: optax.constant_schedule(group.lr),
        "cosine": lambda: optax.cosine_decay_schedule(group.lr, rest, alpha=group.lr_end / group.lr if group.lr else 0.0),
        "linear": lambda: optax.linear_schedule(group.lr, group.lr_end, rest),
    }[group.schedule]()
    if not group.warmup:
        return after
    # The first update already moves: step k of the warm-up has (k + 1) / warmup of the peak.
    warm = optax.linear_schedule(group.lr / group.warmup, group.lr, max(group.warmup - 1, 1))
    return optax.join_schedules([warm, after], [group.warmup])


def make_optimizer(group: Any, cfg: ModelConfig, updates: int, where: str) -> optax.GradientTransformation:
    """AdamW with a clipped global gradient; weight decay on matrices only (norms and biases are left alone).

    Args:
      group: ``config.<phase>.optimizer``.
      cfg: of the role it trains.
      updates: of the whole phase, for the schedule.
      where: the group's name, for errors.
    """
    decay = map_specs(lambda s: len(s.hf_shape) == 2, cfg)
    adamw = optax.adamw(
        learning_rate(group, updates, where), b1=group.b1, b2=group.b2, eps=group.eps, weight_decay=group.weight_decay, mask=decay
    )
    return optax.chain(optax.clip_by_global_norm(group.clip_norm), adamw) if group.clip_norm else adamw


def opt_shardings(tx: optax.GradientTransformation, cfg: ModelConfig, mesh: Mesh) -> Any:
    """Moments lie where their parameters lie, counters everywhere. (``jit(tx.init)`` alone puts all moments on one device.)"""
    return optax.tree_map_params(
        tx, lambda _, s: s, jax.eval_shape(tx.init, abstract_params(cfg)), param_shardings(cfg, mesh),
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()))  # fmt: skip
