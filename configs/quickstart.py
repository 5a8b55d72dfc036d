"""PRIME from nothing, on sums: `make quickstart`.

Task      chains of four sums and differences (17+5-9+12=), answered step by step (17+5=22;22-9=13;13+12=25;#25);
          demonstrations mix careful derivations with careless ones that merge two steps and usually get them wrong
Model     a Llama of 0.4 M parameters, from scratch
Phases    1,200 steps of SFT; 10 rounds in which only the PRM learns; 40 rounds of PRIME, the implicit PRM as critic
Hardware  2 CPU cores, about 4 minutes, compilation included
Command   jprm train --config=quickstart
"""

from ml_collections import ConfigDict

from jprm.train.config import default_config


def get_config(arg: str = "") -> ConfigDict:
    c = default_config()
    c.name = "quickstart"
    c.task.options = ConfigDict(dict(operations=4, low=1, high=9, careless=0.4, careless_wrong=0.8))
    c.sampling.max_prompt, c.sampling.max_new = 10, 40  # the longest careful derivation has 36 tokens

    c.sft.steps, c.sft.batch_size = 1200, 64
    c.sft.optimizer.lr = 2e-3  # its sums must be solid (greedy 1.0) before RL: after 900 steps at 4e-3 a twentieth were wrong

    # The PRM sees every row, also of groups that are all right or all wrong: there it learns what a right step looks like.
    c.prm.beta, c.prm.max_steps = 0.2, 8  # responses of 30 tokens; .05 belongs to a thousand
    c.prm.optimizer.lr = 1e-4
    c.rl.prm_rows, c.rl.prm_warmup = "all", 10

    c.rl.iterations, c.rl.prompts, c.rl.group = 50, 32, 8
    c.rl.process_credit, c.rl.process_weight = "baseline", 1.0
    c.rl.optimizer.lr = 1e-4

    c.eval.problems, c.eval.samples, c.eval.pass_k, c.eval.batch = 1000, 4, 8, 125
    c.eval.rank_reference, c.eval.prm_score = True, "accumulative_mean"
    c.checkpoint.every = 100
    c.export.at_end = True
    return c
