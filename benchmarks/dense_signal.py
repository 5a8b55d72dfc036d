"""Does the PRM's dense signal help the policy? PRIME's ways to use it against outcome-only, paired, from one warm start per seed.

    python -m benchmarks.dense_signal [--seeds=0,1] [--iterations=20] [--warmup=10] [--group=8]
        [--workdir=runs/dense] [--json=FILE]

All variants of a seed start from the same weights and see the same problems under the same sampling keys, round by round,
warm-up rounds included (outcome-only waits through them). That matters: on this task the data stream alone moves accuracy by
.07, more than any effect that was ever seen.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

REWARD = ["rl.process_credit=reward", "rl.process_scale=rms"]
VARIANTS = {
    "outcome only": ["rl.process_weight=0.0"],
    "critic": ["rl.process_credit=baseline", "rl.process_weight=1.0"],
    "reward, accumulated": [*REWARD, "rl.process_weight=0.3"],
    "reward, not accumulated": [*REWARD, "rl.process_weight=0.5", "rl.accumulate=False"],
}
QUICK = ["eval.rank_reference=False", "eval.pass_k=0", "checkpoint.every=0", "log.tensorboard=False"]


def train(workdir: pathlib.Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """The summary of one run; one that is complete already is not run again."""
    if not (workdir / "summary.json").exists():
        command = [sys.executable, "-m", "jprm", "train", "--config=quickstart", f"--workdir={workdir}", f"seed={seed}"]
        subprocess.run(command + QUICK + overrides, check=True, stdout=subprocess.DEVNULL)
    return json.loads((workdir / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--iterations", type=int, default=20, help="policy updates after the warm-up")
    parser.add_argument("--warmup", type=int, default=10, help="rounds in which only the PRM learns")
    parser.add_argument("--group", type=int, default=8, help="samples of each of the 32 prompts of a round")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/dense"))
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    found: dict[str, dict[str, dict]] = {name: {} for name in VARIANTS}
    for seed in args.seeds.split(","):
        start = args.workdir / f"start_{seed}"
        train(start, int(seed), ["rl.iterations=0", "export.at_end=True"])
        rounds = [f"rl.iterations={args.warmup + args.iterations}", f"rl.prm_warmup={args.warmup}", f"rl.group={args.group}"]
        rl = [*rounds, "sft.steps=0", "export.at_end=False"]
        for name, overrides in VARIANTS.items():
            kind = name.replace(", ", "_").replace(" ", "_")
            where = args.workdir / f"{kind}_{args.warmup}_{args.iterations}x{args.group}_{seed}"
            found[name][seed] = train(where, int(seed), [f"model.path={start / 'export' / 'policy'}", *rl, *overrides])
            print(f"seed {seed}, {name}: {found[name][seed]['accuracy_after']:.3f}", file=sys.stderr)
    seeds = args.seeds.split(",")
    heads = "".join(f"{'seed ' + s:>10}" for s in seeds)
    print(f"held-out accuracy after {args.iterations} updates{heads}{'against outcome only':>24}")
    for name, by_seed in found.items():
        values = [by_seed[s]["accuracy_after"] for s in seeds]
        gaps = [v - found["outcome only"][s]["accuracy_after"] for v, s in zip(values, seeds)]
        print(f"{name:<36}" + "".join(f"{v:>10.3f}" for v in values) + f"{statistics.mean(gaps):>+24.3f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
