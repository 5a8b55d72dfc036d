"""`jprm evaluate`: the held-out problems, for any checkpoint of a run or for a model that was never trained."""

import json
from typing import Any

import jax

from jprm.train.checkpoint import code_version
from jprm.train.evaluation import Evaluator
from jprm.train.output import plain
from jprm.train.restore import restore_roles
from jprm.train.samples import write_eval_samples
from jprm.train.setup import build
from jprm.train.wrap_up import table


def run(config: Any, step: int | None = None) -> int:
    """Prints the table and writes ``<workdir>/evaluation_<step>.json``, and the rollouts behind it under ``samples/``.

    With the run's own config the numbers are those that training logged at that step. Without any checkpoint it is
    ``config.model.path`` that is evaluated (with ``config.prm.path``, by that PRM against it), as step 0.

    Args:
      config: of the run; ``eval`` and ``sampling`` may differ from training's.
      step: the checkpoint's number; None: the newest.

    Raises:
      UserError: no checkpoint and no model, or a checkpoint without a policy.
    """
    the_run = build(config)
    try:
        with jax.set_mesh(the_run.mesh):
            evaluator = Evaluator(the_run)
            state, source = restore_roles(the_run, ("policy",), optional=("prm", "reference"), step=step)
            numbers, scored = evaluator.measure(state, thorough=True)
            at = int(state.step)
            if jax.process_index() == 0:
                the_run.workdir.mkdir(parents=True, exist_ok=True)
                write_eval_samples(the_run, at, scored)
                path = the_run.workdir / f"evaluation_{at:06d}.json"
                record = {
                    "step": at,
                    "source": source,
                    "metrics": numbers,
                    "eval": config.eval.to_dict(),
                    "sampling": config.sampling.to_dict(),
                    "code": code_version(),
                }
                path.write_text(json.dumps(plain(record), indent=2, allow_nan=False) + "\n")
                print(f"{source}, {len(evaluator.problems)} problems")
                print(table({name.removeprefix("eval/"): value for name, value in numbers.items()}))
                print(f"written: {path}")
    finally:
        the_run.task.close()
    return 0
