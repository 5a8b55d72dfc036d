"""`jprm <verb>`: finds the verb, turns its arguments into one config, calls `run`, and makes user errors readable.

Nothing heavy is imported here: `jprm` alone answers at once, and jax starts only after the arguments have been understood.
"""

import dataclasses
import importlib
import sys
from collections.abc import Sequence

from jprm.errors import UserError


@dataclasses.dataclass(frozen=True)
class Flag:
    """A verb's own flag; its value goes to ``run`` as the keyword ``name``."""

    name: str
    help: str
    kind: type | tuple[str, ...] = str  # a tuple lists the allowed values, the default first
    required: bool = False


@dataclasses.dataclass(frozen=True)
class Verb:
    summary: str
    module: str  # holds run(config, **flags) -> int | None
    flags: tuple[Flag, ...] = ()


STEP = Flag("step", "checkpoint to use, by its number (default: the latest)", int)
VERBS = {
    "train": Verb("train a policy, a process reward model, or both; resumes where it stopped", "jprm.train.loop"),
    "evaluate": Verb("measure a trained policy and its reward model on held-out problems", "jprm.train.evaluate", (STEP,)),
    "score": Verb(
        "score every step of given solutions with a trained reward model",
        "jprm.train.score",
        (
            Flag("rows", "JSONL or parquet file of solutions", required=True),
            Flag("out", "JSONL file to write", required=True),
            Flag("tokens", "also write every token with its reward", bool),
            Flag("threshold", "a step that scores below it is wrong (default: the one the run's evaluation found)", float),
            STEP,
        ),
    ),
    "sample": Verb(
        "write the policy's answers to given prompts",
        "jprm.train.sample",
        (
            Flag("prompts", "JSONL or parquet file of prompts", required=True),
            Flag("out", "JSONL file to write", required=True),
            STEP,
        ),
    ),
    "export": Verb(
        "write trained weights as a Hugging Face folder",
        "jprm.train.export",
        (Flag("out", "folder to write", required=True), Flag("role", "whose weights", ("policy", "prm", "reference")), STEP),
    ),
}
DRY_RUN = Verb("", "jprm.train.dry_run")

USAGE = """\
jprm {verb}: {summary}

  jprm {verb} --config=RECIPE [flags] [key=value ...]

  --config=RECIPE    a shipped recipe's name, or a file: path/to/recipe.py[:argument]
  --workdir=DIR      folder of the run; without --config, the config of the run found there
{flags}
  key=value          overrides a config field: rl.iterations=10 (or --config.rl.iterations=10)

Shipped recipes: {recipes}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0, 2 for an error the user can mend, or what the verb returns."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("--help", "-h", "help"):
            print(listing())
            return 0
        return dispatch(argv[0], argv[1:])
    except UserError as error:
        print(f"jprm: {error}", file=sys.stderr)
        return 2


def listing() -> str:
    """All verbs, one line each."""
    lines = [f"  jprm {name:<9} {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(["jprm: process reward models in JAX", "", *lines, "", "jprm <verb> --help says how to call one."])


def dispatch(name: str, argv: Sequence[str]) -> int:
    """Calls a verb's ``run(config, **flags)``.

    Raises:
      UserError: an unknown verb, or whatever is wrong with its arguments (see `jprm.train.flags.parse`).
    """
    from absl import flags as absl_flags

    from jprm.train import flags

    if name not in VERBS:
        guess = flags.nearest(name, VERBS)
        raise UserError(
            f"an unknown verb {name!r}",
            expected=f"one of {', '.join(VERBS)}",
            where="command line",
            fix=f"Did you mean jprm {guess}" if guess else "Run jprm alone to see them all",
        )
    verb = VERBS[name]
    if any(a in ("--help", "-h") for a in argv):
        print(usage(name, verb, list(flags.recipes())))
        return 0

    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    if name == "train":
        absl_flags.DEFINE_bool("dry_run", False, "print what would be allocated, and allocate nothing", flag_values=values)
    for flag in verb.flags:
        if isinstance(flag.kind, tuple):
            absl_flags.DEFINE_enum(flag.name, flag.kind[0], flag.kind, flag.help, flag_values=values)
        else:
            define = {
                int: absl_flags.DEFINE_integer,
                float: absl_flags.DEFINE_float,
                bool: absl_flags.DEFINE_bool,
                str: absl_flags.DEFINE_string,
            }[flag.kind]
            define(flag.name, False if flag.kind is bool else None, flag.help, flag_values=values)
    config = flags.parse(argv, values)
    for flag in verb.flags:
        if flag.required and not values[flag.name].value:
            raise UserError("nothing", expected=flag.help, where=f"--{flag.name}", fix=f"Add --{flag.name}=...")

    target = DRY_RUN if name == "train" and values["dry_run"].value else verb
    run = importlib.import_module(target.module).run
    return run(config, **{flag.name: values[flag.name].value for flag in target.flags}) or 0


def usage(name: str, verb: Verb, recipes: list[str]) -> str:
    """What ``jprm <verb> --help`` prints."""
    flags = list(verb.flags)
    if name == "train":
        flags.append(Flag("dry_run", "resolve everything, print roles, shapes and bytes, allocate nothing", bool))
    lines = []
    for flag in flags:
        forms = {str: "=...", int: "=N", float: "=X", bool: ""}
        value = forms[flag.kind] if isinstance(flag.kind, type) else "=" + "|".join(flag.kind)
        lines.append(f"  {'--' + flag.name + value:<18} {flag.help}" + (" (required)" if flag.required else ""))
    return USAGE.format(verb=name, summary=verb.summary, flags="\n".join(lines), recipes=", ".join(recipes) or "(none)")


if __name__ == "__main__":
    sys.exit(main())
