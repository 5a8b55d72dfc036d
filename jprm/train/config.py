"""Every field of a run, with its unit or constraint. Recipes under configs/ start from here and change what they need.

A field that nothing reads is a test failure.
"""

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict


def default_config() -> ConfigDict:
    c = ConfigDict()
    c.name = "run"  # shown in reports
    c.seed = 0  # of everything: data order, sampling, initial parameters
    c.workdir = ""  # where the run lives; empty: runs/<name>

    # Model: the policy's start, and through it the reference's and the PRM's.
    c.model = m = ConfigDict()
    m.path = ""  # Hugging Face directory or .gguf file; empty: from scratch, in the shape below
    m.family = "llama"  # llama | qwen2
    m.hidden_size, m.intermediate_size = 96, 288
    m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim = 3, 4, 4, 24
    m.tie_word_embeddings = True
    m.max_position_embeddings = 2048
    m.dtype = "auto"  # compute dtype: bfloat16 on accelerators, float32 on CPU; masters are always float32
    m.remat = "none"  # none | full | a member of jax.checkpoint_policies
    m.logits_chunk = 16384  # vocabulary rows per block of the head
    m.unroll = 1  # layers per iteration of the layer loop

    c.tokenizer = t = ConfigDict()
    t.path = ""  # empty: the model's, or the task's own for a model from scratch
    t.template = "auto"  # chat | plain | auto: chat where the tokenizer has a template
    t.system = ""  # system prompt of the chat template

    c.mesh = ConfigDict(dict(data=1, fsdp=-1, tensor=1))  # sizes; one of them may be -1: what is left

    # Task: where prompts come from and what judges a response.
    c.task = k = ConfigDict()
    k.name = "arithmetic"  # arithmetic | file | reasoning_gym:<task>
    k.train, k.eval = (), ()  # files of prompts (name = file): .jsonl, .json, .parquet
    k.split_by_hash = 0.0  # > 0: hold out this share of `train` by SHA-256 of the question
    k.prompt_column, k.answer_column = "", ""  # empty: found by the file's schema
    k.verifier = "auto"  # auto | number | math_verify | module:function | file.py:function
    k.verifier_timeout_s, k.verifier_workers = 5.0, 1  # wall limit per response; killable processes
    k.separator = ""  # text that ends a reasoning step; empty: the task's own
    k.options = ConfigDict()  # keyword arguments of the task

    # Rollouts.
    c.sampling = s = ConfigDict()
    s.max_prompt, s.max_new, s.min_new = 32, 48, 0  # tokens
    s.temperature, s.top_k, s.top_p = 1.0, 0, 1.0
    s.stop_strings = ()  # a response is cut after the first of these, on the host

    # Phase 1: supervised warm start of the policy.
    c.sft = p = ConfigDict()
    p.steps, p.batch_size, p.max_length = 0, 64, 0  # max_length 0: max_prompt + max_new
    p.data = ()  # files of prompt/response rows; empty: the task's own demonstrations
    p.micro_batch = 0  # rows per micro-batch; 0: all at once
    p.optimizer = _optimizer(lr=1e-3, warmup=50, schedule="cosine")

    # Phase 2: offline implicit PRM from outcome-labelled rows.
    c.prm = p = ConfigDict()
    p.steps, p.batch_size, p.max_length = 0, 64, 0
    p.data = ()  # files of prompt/response/label rows
    p.micro_batch = 0
    p.beta = 0.05  # temperature of the log-ratio in the loss; .05 belongs to a thousand tokens, .1 to 1 to a few dozen
    p.balance = "batch"  # batch: both classes weigh the same in every batch; none
    p.score_scale = 1.0  # factor on beta x log-ratio when scoring; recorded with the weights
    p.max_steps = 16  # S: steps beyond it merge into the last
    p.reference_logps = "recompute"  # recompute | cache: kept on the host after a row's first visit (4 bytes a token)
    p.path = ""  # a PRM to start from; empty: the policy as it stands when the PRM is first needed
    p.optimizer = _optimizer(lr=1e-4, warmup=0, schedule="constant", clip_norm=10.0)

    # Phase 3: reinforcement learning.
    c.rl = r = ConfigDict()
    r.iterations, r.prompts, r.group = 0, 32, 8  # P prompts x G samples a round
    r.oversample = 1  # c: sample c x P prompts and keep P that pass the accuracy band
    r.band_low, r.band_high = 0.0, 1.0  # accuracy band of a kept group, bounds included
    r.mask_uniform = True  # groups that are all right or all wrong teach nothing (the PRM: see prm_rows)
    r.estimator = "rloo"  # grpo | dr_grpo | rloo: baseline of the outcome
    r.outcome_weight, r.outcome_gamma = 1.0, 1.0
    r.process_weight, r.process_gamma = 1.0, 1.0  # weight 0: outcome only, no PRM in the step
    r.process_credit = "reward"  # reward: PRIME; baseline: the PRM is a critic, its value of the prefix the outcome's baseline
    r.formula = "paper"  # paper | prime_code: process leave-one-out of process_credit=reward
    r.granularity = "token"  # token | step
    r.accumulate = True  # reward: credit a token with the rewards after it, too
    r.process_scale, r.scale_floor = "max_return", 1e-3  # max_return | rms | none; the divisor never falls below the floor
    r.whiten = True  # advantages to mean 0, variance 1 over the batch
    r.prm_order = "after"  # after | before | none: the PRM learns after its rewards are taken, before, or never
    r.prm_rows = "kept"  # kept: the PRM learns from the groups the policy learns from; all: from every row with a verdict
    r.prm_warmup = 0  # first rounds in which the PRM learns and the policy does not
    r.prm_minibatches = 1  # PRM updates a round
    r.epochs, r.minibatches = 1, 1  # policy updates a round: epochs x minibatches
    r.micro_batch = 0  # rows per forward/backward; 0: a whole minibatch
    r.old_logp = "recompute"  # recompute | behavior: the ratio's denominator where there are several updates
    r.clip_low, r.clip_high, r.dual_clip = 0.2, 0.2, 0.0  # dual_clip 0: off
    r.aggregation = "token_mean"  # token_mean | sequence_mean | sequence_sum | constant (max_new)
    r.kl_coef, r.kl_kind, r.kl_in = 0.0, "k3", "loss"  # kl_in: loss | reward
    r.entropy_coef = 0.0
    r.ddof, r.eps = 1, 1e-6  # of GRPO's standard deviation
    r.optimizer = _optimizer(lr=1e-4, warmup=0, schedule="constant")

    c.eval = e = ConfigDict()
    e.every = 0  # iterations of RL between evaluations; 0: only where a phase ends
    e.problems, e.samples = 200, 4  # problems of the eval split x samples at the training temperature
    e.batch = 64  # problems per call
    e.pass_k = 0  # > 0: also pass@k, majority@k and best-of-k over this many samples, before RL and at the end
    e.rank_reference = False  # also sample from the reference and let the PRM choose: best-of-k of the policy as RL began
    e.prm_score = "single_sum"  # how step scores rank whole responses, see jprm.reward.scores
    e.first_error_rows = "demonstrations"  # demonstrations | policy: the task's, held out, the same for every run; or its own
    e.first_error_score = "single"  # single | accumulative: the step score that is compared with a threshold

    c.checkpoint = k = ConfigDict()
    k.every, k.keep = 100, 2  # iterations; newest complete ones kept
    k.resume = True  # continue the workdir's newest checkpoint

    c.log = g = ConfigDict()
    g.every_s = 10.0  # seconds between lines where stdout is no terminal
    g.samples_every, g.samples_rows = 10, 16  # iterations between sample files; rollouts in one
    g.tensorboard = True
    g.max_skipped = 5  # stop after this many non-finite updates in a row
    g.compilation_cache = ""  # directory of compiled programs kept between runs; empty: none

    c.export = x = ConfigDict()
    x.at_end = False  # write <workdir>/export/{policy,prm} when training is done
    x.dtype = "auto"  # dtype of exported tensors; auto: bfloat16 for a loaded model, float32 for one from scratch
    return c


def _optimizer(*, lr: float, warmup: int, schedule: str, clip_norm: float = 1.0) -> ConfigDict:
    o = ConfigDict()
    o.lr = lr  # peak
    o.warmup, o.schedule = warmup, schedule  # updates; constant | cosine | linear (to lr_end at the phase's last update)
    o.lr_end = 0.0
    o.b1, o.b2, o.eps, o.weight_decay = 0.9, 0.95, 1e-8, 0.0  # AdamW; decay on matrices only
    o.clip_norm = clip_norm  # of the global gradient; 0: off
    return o


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a config, in its order."""
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
