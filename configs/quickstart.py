"""PRIME from nothing, on sums: `make quickstart`.

Task      chains of four sums and differences, e.g. 17+5-9+12= ; the demonstrations mix careful derivations and careless ones
Hardware  2 CPU cores
Command   jprm train --config=quickstart
"""

from ml_collections import ConfigDict

from jprm.train.config import default_config


def get_config(arg: str = "") -> ConfigDict:
    c = default_config()
    c.name = "quickstart"
    c.task.options = ConfigDict(dict(operations=4, low=1, high=9, careless=0.4, careless_wrong=0.8))
    c.sampling.max_prompt, c.sampling.max_new = 12, 44
    c.sft.steps, c.sft.batch_size = 900, 64
    c.rl.iterations, c.rl.prompts, c.rl.group = 60, 32, 8
    c.rl.prm_warmup = 20
    c.rl.granularity, c.rl.accumulate, c.rl.process_scale, c.rl.process_weight = "step", False, "rms", 0.3
    c.prm.beta, c.prm.max_steps = 0.5, 8
    c.eval.problems, c.eval.samples, c.eval.pass_k, c.eval.batch = 1000, 4, 8, 250
    c.checkpoint.every = 200
    c.export.at_end = True
    return c
