"""The roles of a run that the other verbs need: from its checkpoint, or from the models that its config names."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jprm.errors import UserError
from jprm.model.spec import abstract_params
from jprm.rl.learner import Learner
from jprm.train import checkpoint
from jprm.train.prompts import replicated
from jprm.train.same_run import check_same_run
from jprm.train.setup import Run
from jprm.train.state import TrainState

log = logging.getLogger(__name__)
ROLES = ("policy", "prm", "reference")
# What a verb may change: everything but the vocabulary and the shape, which give the stored numbers their meaning.
FREE = (
    "name",
    "seed",
    "workdir",
    "mesh",
    "task",
    "sampling",
    "sft",
    "prm",
    "rl",
    "eval",
    "checkpoint",
    "log",
    "export",
    "model.path",
    "model.dtype",
    "model.remat",
    "model.logits_chunk",
    "model.unroll",
    "tokenizer.path",
)


def restore_roles(
    run: Run, needed: Sequence[str], *, optional: Sequence[str] = (), step: int | None = None, untrained: bool = True
) -> tuple[TrainState, str]:
    """A state that holds the named roles and nothing else: no optimizer, no other role is read or allocated.

    Args:
      run: its workdir's checkpoints are looked at first.
      needed: of :data:`ROLES`.
      optional: more roles, taken where *all* of them are there (a PRM scores nothing without its reference).
      step: the checkpoint's number; None: the newest whole one.
      untrained: where there is no checkpoint at all, take the policy and the reference from ``config.model.path`` and the PRM
        from ``config.prm.path``. The state's step is 0 then.

    Returns:
      (state, where it comes from, for people).

    Raises:
      UserError: no checkpoint, one without a needed role, or one of another shape.
    """
    folder = run.workdir / "checkpoints"
    chosen: list[str] = []

    def template(meta: dict) -> TrainState:
        check_same_run(meta["config"], run.config.to_dict(), where=str(folder), free=FREE)
        chosen.extend(
            _choose({name.split(".")[0] for name in meta["leaves"]}, needed, optional, f"checkpoint {meta['step']} in {folder}")
        )
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(run.mesh, PartitionSpec()))
        roles = {}
        for role in chosen:
            prefix = "reference." if role == "reference" else f"{role}.params."
            # As stored: a run on an accelerator keeps its reference in bfloat16, wherever it is looked at later.
            dtype = next(leaf["dtype"] for name, leaf in meta["leaves"].items() if name.startswith(prefix))
            params = abstract_params(run.cfg, run.mesh, dtype)
            roles[role] = params if role == "reference" else Learner(params, ())
        return TrainState(scalar, scalar, **roles)

    found = checkpoint.restore(folder, template, step, partial=True)
    if found is not None:
        state, meta = found
        return state, f"checkpoint {meta['step']} of {run.workdir}"
    if untrained and run.config.model.path:
        return _from_models(run, needed, optional)
    raise UserError(
        "no checkpoint",
        expected="a run that has saved one" + (", or config.model.path" if untrained else ""),
        where=str(folder),
        fix="Give the --workdir of a run that has trained",
    )


def params_of(state: TrainState, role: str) -> Any:
    """The parameters of one role."""
    return state.reference if role == "reference" else getattr(state, role).params


def _choose(there: set[str], needed: Sequence[str], optional: Sequence[str], where: str) -> list[str]:
    for role in needed:
        if role not in there:
            have = ", ".join(r for r in ROLES if r in there)
            raise UserError(
                f"no {role}, only {have}",
                expected=f"the {role}",
                where=where,
                fix=f"Name a step of a phase that has the {role} (--step), or train one",
            )
    return [*needed, *(r for r in optional if r not in needed)] if set(optional) <= there else list(needed)


def _from_models(run: Run, needed: Sequence[str], optional: Sequence[str]) -> tuple[TrainState, str]:
    config = run.config
    there = {"policy", "reference"} | ({"prm"} if config.prm.path else set())
    where = "config.prm.path" if "prm" not in there else "config.model.path"
    chosen = _choose(there, needed, optional, where)
    roles: dict[str, Any] = {}
    if "policy" in chosen:
        roles["policy"] = Learner(run.load(config.model.path), ())
    if "prm" in chosen:
        roles["prm"] = Learner(run.load(config.prm.path), ())
    if "reference" in chosen:
        roles["reference"] = run.load(config.model.path)
    zeros = (replicated(run, jnp.int32(0)) for _ in range(2))
    names = config.model.path + (f", and the PRM {config.prm.path}" if "prm" in chosen else "")
    log.warning("no checkpoint in %s: taking %s", run.workdir, names)
    return TrainState(*zeros, **roles), names
