"""`jprm export`: the weights of one role of a run as a Hugging Face folder."""

from typing import Any

import jax

from jprm.train.output import check_new
from jprm.train.restore import params_of, restore_roles
from jprm.train.setup import build
from jprm.train.wrap_up import export_role


def run(config: Any, out: str, role: str = "policy", step: int | None = None) -> int:
    """Writes ``out``, which ``transformers`` loads.

    A PRM that was trained after a warm start scores against the policy as it stood then: export ``role="reference"`` as well.

    Args:
      config: of the run; ``export.dtype`` says in which dtype.
      out: a new folder.
      role: ``policy``, ``prm`` or ``reference``.
      step: the checkpoint's number; None: the newest.

    Raises:
      UserError: ``out`` is taken, or the run has no checkpoint with that role.
    """
    target = check_new(out, folder=True)
    the_run = build(config)
    try:
        with jax.set_mesh(the_run.mesh):
            state, source = restore_roles(the_run, (role,), step=step, untrained=False)
            export_role(the_run, role, params_of(state, role), target)
    finally:
        the_run.task.close()
    if jax.process_index() == 0:
        print(f"{role} of {source}: {target}")
    return 0
