"""Seconds of one whole RL step (rollout + verify + update): GRPO, PRIME, and the peers on the same work, interleaved.

    python -m benchmarks.rl_step [--json=FILE] [--rounds=3] [--trl=PYTHON] [--tunix=PYTHON] [--peers=DIR]

The workload is a Qwen2-shaped decoder of 3.3 M parameters, 8 prompts x 8 samples, 32 prompt + 64 new tokens, fp32, KL
coefficient .001 against one frozen reference (shared by policy and PRM), one update per rollout, no rematerialisation. ``--trl``
and ``--tunix`` are the interpreters of environments that have the peers; ``--peers`` is the folder of their scripts
(trl_grpo.py, tunix_grpo.py).

Every round runs each contestant once, so that a machine that slows down slows all of them; medians are over all steps of all
rounds, the first of each run left out (it compiles).
"""

import argparse
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jprm.model.config import ModelConfig
from jprm.model.decode import sample
from jprm.model.sampling import Sampling, row_keys
from jprm.model.spec import count_params, forward_flops, init_params
from jprm.rl.compositions import build_advantage
from jprm.rl.learner import Learner
from jprm.rl.rollouts import from_samples
from jprm.rl.step import StepSpec, make_step

PROMPTS, GROUP, PROMPT_LEN, NEW = 8, 8, 32, 64
ROWS, LENGTH = PROMPTS * GROUP, PROMPT_LEN + NEW
CFG = ModelConfig(
    family="qwen2",
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    qkv_bias=True,
    max_position_embeddings=512,
)
STOP = 2
SEPARATOR = 7  # an arbitrary id: steps cost the same whichever it is


class Contestant:
    """Our step on the workload; ``prime`` adds the PRM."""

    def __init__(self, prime: bool):
        self.name = "prime" if prime else "grpo"
        params = jax.jit(init_params, static_argnums=0)(CFG, jax.random.key(0))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
        copy = lambda: jax.tree.map(jnp.copy, params)
        self.policy = Learner(copy(), jax.jit(tx.init)(params))
        self.prm = Learner(copy(), jax.jit(tx.init)(params)) if prime else None
        self.reference, self.iteration = copy(), 0
        advantage = build_advantage(estimator="grpo", process_weight=1.0 if prime else 0.0, whiten=prime)
        spec = StepSpec(window=NEW, prompts=PROMPTS, mask_uniform=False, kl_coef=0.001)
        self.learn = jax.jit(make_step(CFG, spec, advantage, tx, tx if prime else None), donate_argnums=(0, 1))
        self.draw = jax.jit(self._draw)
        self.gather = jax.jit(self._rollouts)

    @staticmethod
    def _draw(params, prompts, iteration):
        sampling, keys = Sampling(max_new=NEW, min_new=NEW, stop_ids=(STOP,)), row_keys(0, iteration, ROWS)
        return sample(params, CFG, prompts, jnp.full(PROMPTS, PROMPT_LEN), keys, group=GROUP, sampling=sampling)

    @staticmethod
    def _rollouts(s, outcome):
        known, separators = jnp.ones(ROWS, bool), jnp.arange(CFG.vocab_size) == SEPARATOR
        return from_samples(s, outcome, known, group=GROUP, is_separator_V=separators, max_steps=8)

    def run(self) -> dict[str, float]:
        """One whole step: seconds of ``rollout_s`` (verdicts included) and of ``step_s`` (all of it)."""
        prompts = np.random.default_rng(self.iteration).integers(3, CFG.vocab_size, (PROMPTS, PROMPT_LEN)).astype(np.int32)
        start = time.perf_counter()
        s = self.draw(self.policy.params, prompts, self.iteration)
        tokens = np.asarray(s.tokens)
        kinds = [len(set(row[PROMPT_LEN:].tolist())) for row in tokens]
        outcome = np.array([n % 7 for n in kinds], np.float32)  # the reward of the peers' scripts
        if self.prm is not None:
            outcome = (outcome > 3).astype(np.float32)  # a PRM learns from right and wrong
        rollouts = self.gather(s, outcome)
        sampled = time.perf_counter()
        self.policy, self.prm, _, metrics, _ = self.learn(self.policy, self.prm, self.reference, rollouts, np.True_)
        jax.block_until_ready((self.policy, self.prm, metrics))
        self.iteration += 1
        return {"rollout_s": sampled - start, "step_s": time.perf_counter() - start}


def matmul_gflops(n: int = 2048) -> float:
    """GFLOP/s of one large fp32 matmul: the machine's rate at its best."""
    a = jnp.ones((n, n))
    f = jax.jit(lambda x: x @ a)
    jax.block_until_ready(f(a))
    start = time.perf_counter()
    jax.block_until_ready(f(a))
    return 2 * n**3 / (time.perf_counter() - start) / 1e9


def step_flops() -> dict[str, int]:
    """Model FLOPs of one whole step by formula: decode, reference forward, and forward + backward of each trained model."""
    decode = forward_flops(CFG, PROMPTS, PROMPT_LEN, 1) + forward_flops(CFG, ROWS, LENGTH) - forward_flops(CFG, ROWS, PROMPT_LEN)
    forward = forward_flops(CFG, ROWS, LENGTH, NEW)
    return {"rollout": decode, "grpo": decode + forward + 3 * forward, "prime": decode + forward + 6 * forward}


def memory_floor(prime: bool) -> int:
    """Bytes that have to be held: masters, moments and gradients of each trained model, and the reference."""
    return 4 * count_params(CFG) * (4 * (2 if prime else 1) + 1)


def peer_steps(python: str, script: pathlib.Path) -> list[float]:
    """Seconds per step that a peer's script prints, its first step left out."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
    done = subprocess.run([python, str(script)], capture_output=True, text=True, env=env, timeout=900)
    found = re.findall(r"(?:gaps|median)[^\[\n]*\[([^\]]*)\]", done.stdout)
    if not found:
        raise SystemExit(f"{script} printed no times:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    times = [float(x) for x in found[0].split(",")]
    return times[1:] if "tunix" in script.name else times  # TRL's clock starts after its first step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps of ours in each round")
    parser.add_argument("--trl")
    parser.add_argument("--tunix")
    parser.add_argument("--peers", type=pathlib.Path, default=pathlib.Path("../shared/peers"))
    args = parser.parse_args()

    ours = {c.name: c for c in (Contestant(prime=False), Contestant(prime=True))}
    for c in ours.values():
        c.run()  # compiles
    pythons = {"trl": args.trl, "tunix": args.tunix}
    peers = {name: (python, args.peers / f"{name}_grpo.py") for name, python in pythons.items() if python}
    seconds: dict[str, list[float]] = {name: [] for name in ("rollout", *ours, *peers, "matmul")}
    for _ in range(args.rounds):
        for _ in range(args.steps):
            seconds["matmul"].append(matmul_gflops())
            for name, c in ours.items():
                one = c.run()
                seconds[name].append(one["step_s"])
                seconds["rollout"].append(one["rollout_s"])
        for name, (python, script) in peers.items():
            seconds[name] += peer_steps(python, script)

    medians = {name: statistics.median(values) for name, values in seconds.items() if values}
    rate, flops = medians.pop("matmul"), step_flops()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"large fp32 matmul: {rate:.0f} GFLOP/s; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':10}{'median s':>10}{'min':>8}{'max':>8}{'GFLOP':>9}{'floor s':>9}{'share':>7}{'x grpo':>8}")
    for name, median in medians.items():
        work = flops.get(name, flops["grpo"] if name in peers else 0) / 1e9
        floor, low, high = work / rate, min(seconds[name]), max(seconds[name])
        times = f"{median:10.3f}{low:8.3f}{high:8.3f}{work:9.1f}{floor:9.3f}"
        print(f"{name:10}{times}{floor / median:7.0%}{median / medians['grpo']:8.2f}")
    print(f"FLOP ratio prime / grpo: {flops['prime'] / flops['grpo']:.2f}")
    print(f"peak memory of this process: {peak / 2**20:.0f} MiB (both contestants and JAX itself)")
    print(f"floor of PRIME's parameters, moments, gradients: {memory_floor(True) / 2**20:.0f} MiB")
    if args.json:
        names = {"rollout": "rollout_s", "grpo": "grpo_step_s", "prime": "prime_step_s"}
        out = {names.get(k, f"{k}_step_s"): v for k, v in medians.items()}
        out |= {"matmul_gflops": rate, "peak_bytes": peak, "flops": flops, "all": seconds}
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
