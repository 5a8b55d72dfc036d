"""What a run carries from one iteration to the next, and how its phases hand over."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jprm.errors import UserError
from jprm.model.config import ModelConfig
from jprm.model.spec import Params, abstract_params, param_shardings
from jprm.rl.learner import Learner
from jprm.train.optim import make_optimizer, opt_shardings


@flax.struct.dataclass
class TrainState:
    """Everything a checkpoint holds. Roles that a phase does not use are None.

    Attributes:
      step: i32[] iterations done, over all phases; it indexes data and random keys.
      skipped: i32[] iterations in a row whose updates were thrown away as non-finite.
      policy, prm: :class:`jprm.rl.learner.Learner`.
      reference: frozen parameters in the compute dtype.
    """

    step: jax.Array
    skipped: jax.Array
    policy: Learner | None = None
    prm: Learner | None = None
    reference: Params | None = None


@dataclasses.dataclass(frozen=True)
class Phase:
    """Iterations start < i <= end of a run, their roles, and the optimizers of those that learn."""

    name: str
    start: int
    end: int
    policy_tx: optax.GradientTransformation | None
    prm_tx: optax.GradientTransformation | None
    has_policy: bool
    has_prm: bool
    has_reference: bool


def make_phases(config: Any, cfg: ModelConfig) -> list[Phase]:
    """The phases of a run in order; those of length 0 are left out.

    Raises:
      UserError: nothing to do, or an optimizer that does not fit its phase.
    """
    rl, prm = config.rl, config.prm
    with_prm, with_rl = rl.process_weight != 0, rl.iterations > 0
    sizes = {"sft": config.sft.steps, "prm": prm.steps, "rl": rl.iterations}
    if not any(sizes.values()) or min(sizes.values()) < 0:
        raise UserError(
            ", ".join(f"{k}: {v}" for k, v in sizes.items()) + " iterations",
            expected="at least one phase of positive length",
            where="config.{sft.steps, prm.steps, rl.iterations}",
            fix="Set config.rl.iterations, or one of the others, to a positive number",
        )
    phases, start = [], 0
    for name, size in sizes.items():
        if not size:
            continue
        policy_tx = prm_tx = None
        if name == "sft":
            policy_tx = make_optimizer(config.sft.optimizer, cfg, size, "config.sft.optimizer")
        if name == "rl":
            policy_tx = make_optimizer(rl.optimizer, cfg, size * rl.epochs * rl.minibatches, "config.rl.optimizer")
        if name == "prm" or (name == "rl" and with_prm and rl.prm_order != "none"):
            updates = size * (rl.prm_minibatches if name == "rl" else 1)
            prm_tx = make_optimizer(prm.optimizer, cfg, updates, "config.prm.optimizer")
        phases.append(
            Phase(
                name,
                start,
                end=start + size,
                policy_tx=policy_tx,
                prm_tx=prm_tx,
                has_policy=name != "prm" or with_rl,
                has_prm=name == "prm" or (name == "rl" and with_prm),
                has_reference=name == "prm" or (name == "rl" and (with_prm or rl.kl_coef > 0)),
            )
        )
        start += size
    return phases


def phase_of(phases: list[Phase], step: int) -> Phase:
    """The phase in which iteration ``step`` (1-based: the state after it) was done."""
    return next(p for p in phases if p.start < step <= p.end)  # a workdir of more iterations is refused before


def abstract_state(phase: Phase, cfg: ModelConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state during a phase; allocates nothing."""

    def learner(tx: optax.GradientTransformation | None) -> Learner:
        params = abstract_params(cfg, mesh)
        if tx is None:
            return Learner(params, ())
        shapes, where = jax.eval_shape(tx.init, params), opt_shardings(tx, cfg, mesh)
        return Learner(params, jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where))

    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return TrainState(
        scalar,
        scalar,
        policy=learner(phase.policy_tx) if phase.has_policy else None,
        prm=learner(phase.prm_tx) if phase.has_prm else None,
        reference=abstract_params(cfg, mesh, cfg.dtype) if phase.has_reference else None,
    )


def state_shardings(phase: Phase, cfg: ModelConfig, mesh: Mesh) -> TrainState:
    """Where every array of the state lies. Steps are jitted with these as ``out_shardings``.

    Left to the compiler, a state may come back elsewhere, or with shardings that are spelled in another way; then the next call
    is a miss in jit's cache.
    """
    return jax.tree.map(lambda x: x.sharding, abstract_state(phase, cfg, mesh))


def enter(phase: Phase, state: TrainState, cfg: ModelConfig, mesh: Mesh, prm_params: Params | None = None) -> TrainState:
    """The state with which a phase begins: roles it needs are made from those it finds, optimizers start afresh.

    The reference and the PRM start as the policy stands when they are first needed (``prm_params``: the PRM from elsewhere).

    Args:
      phase: about to begin.
      state: as the phase before left it; at the very start a policy of bare parameters (``opt_state=()``).
    """
    shardings = param_shardings(cfg, mesh)
    copy = jax.jit(lambda p: jax.tree.map(jnp.copy, p), out_shardings=shardings)  # donated buffers must not be shared
    cast = jax.jit(lambda p: jax.tree.map(lambda x: jnp.copy(x).astype(cfg.dtype), p), out_shardings=shardings)

    def fresh(params: Params, tx: optax.GradientTransformation | None) -> Learner:
        return Learner(params, () if tx is None else jax.jit(tx.init, out_shardings=opt_shardings(tx, cfg, mesh))(params))

    policy, prm, reference = state.policy, state.prm, state.reference
    if phase.has_reference and reference is None:
        reference = cast(policy.params)
    if phase.has_prm:
        start = prm.params if prm is not None else prm_params if prm_params is not None else copy(policy.params)
        prm = fresh(start, phase.prm_tx)
    return state.replace(
        policy=fresh(policy.params, phase.policy_tx) if phase.has_policy else None,
        prm=prm if phase.has_prm else None,
        reference=reference if phase.has_reference else None,
    )
