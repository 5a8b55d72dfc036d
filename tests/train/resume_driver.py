"""``jprm`` in a process of its own that is killed at a chosen iteration (see resume_test.py).

PLAN is JSON: {"at": iteration, "after": checkpoint that must be complete by then, "signal": number} kills; {"lose": [prefix, …]}
loses arrays of the restored checkpoint. About every second response is judged right, whatever the policy.
"""

import json
import os
import pathlib
import sys
import time

import jax

from jprm import cli
from jprm.train import checkpoint, loop
from tests.train.tiny import judged_by_a_coin

PLAN = json.loads(os.environ.get("PLAN", "{}"))
report, restore = loop.report, checkpoint.restore


def report_then_die(run, metrics, progress, phase, done):
    report(run, metrics, progress, phase, done)
    if done.step == PLAN.get("at"):
        whole = pathlib.Path(run.workdir) / "checkpoints" / f"{PLAN['after']:06d}" / "MANIFEST.json"
        while PLAN["after"] and not whole.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), PLAN["signal"])


def restore_with_losses(*args, **kwargs):
    found = restore(*args, **kwargs)
    if found is None:
        return None

    def keep(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.numpy.zeros_like(leaf) if any(name.startswith(p) for p in PLAN.get("lose", ())) else leaf

    return jax.tree_util.tree_map_with_path(keep, found[0]), found[1]


if __name__ == "__main__":
    loop.report, checkpoint.restore, loop.build = report_then_die, restore_with_losses, judged_by_a_coin
    sys.exit(cli.main(sys.argv[1:]))
