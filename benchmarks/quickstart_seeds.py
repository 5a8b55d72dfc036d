"""The quickstart under several seeds: its summary as one table, mean and spread.

    python -m benchmarks.quickstart_seeds [--seeds=0,1,2] [--workdir=runs/seeds] [--json=FILE]
        [--variant=NAME:key=value,key=value …]

Each ``--variant`` is run beside the recipe with its overrides, seed by seed, so that a slower machine slows all alike; for
instance ``--variant=outcome_only:rl.process_weight=0``. A run that is complete already is not run again.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ROWS = (
    "accuracy_before",
    "accuracy_after",
    "greedy_before",
    "greedy_after",
    "pass_at_8_before",
    "pass_at_8_after",
    "majority_at_8",
    "prm_best_of_8",
    "prm_auc",
    "prm_first_error_f1",
    "prm_first_error_f1_chance",
    "seconds",
)


def run(workdir: pathlib.Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """The summary of one quickstart."""
    if not (workdir / "summary.json").exists():
        command = [sys.executable, "-m", "jprm", "train", "--config=quickstart", f"--workdir={workdir}", f"seed={seed}"]
        subprocess.run(command + overrides, check=True, stdout=subprocess.DEVNULL)
    return json.loads((workdir / "summary.json").read_text())


def cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3g}{spread}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/seeds"))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--variant", action="append", default=[])
    args = parser.parse_args()
    variants = {"quickstart": []} | {name: keys.split(",") for name, _, keys in (v.partition(":") for v in args.variant)}
    found: dict[str, dict[str, dict]] = {name: {} for name in variants}
    for seed in args.seeds.split(","):
        for name, overrides in variants.items():
            found[name][seed] = run(args.workdir / f"{name}_{seed}", int(seed), overrides)
            before, after = (found[name][seed][f"accuracy_{when}"] for when in ("before", "after"))
            print(f"{name} seed {seed}: {before:.3f} -> {after:.3f}", file=sys.stderr)
    width = max(map(len, ROWS))
    seeds = "".join(f"{'seed ' + s:>10}" for s in args.seeds.split(","))
    print(f"{'':{width}}  {''.join(f'{name:>22}' for name in variants)}{seeds}")
    for row in ROWS:
        means = "".join(f"{cell([s[row] for s in by_seed.values() if s.get(row) is not None]):>22}" for by_seed in found.values())
        each = "".join(f"{s[row]:>10.3f}" if s.get(row) is not None else f"{'-':>10}" for s in found["quickstart"].values())
        print(f"{row:{width}}  {means}{each}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
