"""From the command line to one locked config: which recipe, which overrides, and what is said when either is wrong.

A config comes from a recipe (``--config=quickstart``, ``--config=path/to/file.py:argument``) or, where no recipe is named, from
the ``config.json`` of an earlier run (``--workdir``). Overrides are applied to it by ``ml_collections.config_flags``:
``--config.rl.iterations=10``, or the same without the dashes, ``rl.iterations=10``.
"""

import difflib
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags

from jprm.errors import UserError


def recipes() -> dict[str, pathlib.Path]:
    """The shipped recipes by name: ``jprm/recipes`` where jprm is installed, ``configs`` in a checkout."""
    package = pathlib.Path(__file__).resolve().parent.parent
    folder = next((f for f in (package / "recipes", package.parent / "configs") if f.is_dir()), None)
    return {f.stem: f for f in sorted(folder.glob("[!_]*.py"))} if folder else {}


def resolve_recipe(text: str) -> str:
    """``NAME[:ARG]`` or ``FILE.py[:ARG]`` -> ``FILE.py[:ARG]`` with the file known to exist.

    Raises:
      UserError: no such file, or no shipped recipe of that name; says the nearest and lists all.
    """
    name, colon, arg = text.partition(":")
    if name.endswith(".py") or "/" in name:
        if pathlib.Path(name).is_file():
            return text
        raise UserError(
            f"no file {name!r}",
            expected="a Python file with get_config()",
            where="--config",
            fix="Give the path of an existing recipe, or the bare name of a shipped one",
        )
    shipped = recipes()
    if name not in shipped:
        guess = nearest(name, shipped)
        raise UserError(
            f"no recipe {name!r}",
            expected=f"one of {', '.join(shipped) or '(none is installed)'}",
            where="--config",
            fix=f"Did you mean --config={guess}" if guess else "Give one of these names, or the path of a .py file",
        )
    return f"{shipped[name]}{colon}{arg}"


def load_recipe(text: str) -> ml_collections.ConfigDict:
    """The config that a recipe returns, without overrides.

    Raises:
      UserError: no such recipe, or the file has no ``get_config``.
    """
    path = resolve_recipe(text)
    values = flags.FlagValues()
    argv = ["jprm", f"--config={path}"]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except flags.IllegalFlagValueError as error:
        raise UserError(
            str(error),
            expected="a file whose get_config(arg) returns a ConfigDict",
            where=f"--config={text}",
            fix="Mend get_config in that file, or the argument after the colon",
        ) from error
    return values["config"].value


def load_saved(workdir: str) -> ml_collections.ConfigDict:
    """The resolved config of an earlier run, read back from ``<workdir>/config.json``.

    JSON knows neither tuples nor the type of an unset field, so values are laid over the default config, which knows both.

    Raises:
      UserError: the file is missing or no JSON object.
    """
    from jprm.train.config import default_config  # late: the tests of this file need no default config

    path = pathlib.Path(workdir) / "config.json"
    if not path.is_file():
        raise UserError(
            f"no {path}",
            expected="the folder of an earlier run",
            where="--workdir",
            fix="Name a recipe with --config, or the folder of a run that exists",
        )
    try:
        saved = json.loads(path.read_text())
        if not isinstance(saved, dict):
            raise ValueError(f"a JSON {type(saved).__name__}")
    except ValueError as error:
        raise UserError(
            f"unreadable JSON ({error})",
            expected="the object that the run wrote",
            where=str(path),
            fix="Restore the file, or name the recipe with --config",
        ) from error
    return overlay(default_config(), saved)


def overlay(config: ml_collections.ConfigDict, saved: dict) -> ml_collections.ConfigDict:
    """``saved`` (plain JSON) laid over ``config`` in place: lists become tuples where the config holds one."""
    with config.unlocked():
        for key, value in saved.items():
            old = config.get(key)
            if isinstance(old, ml_collections.ConfigDict) and isinstance(value, dict):
                overlay(old, value)
            else:
                config[key] = _tuples(value) if old is None or isinstance(old, tuple) else value
    return config


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def parse(argv: Sequence[str], extra: flags.FlagValues) -> ml_collections.ConfigDict:
    """The config that ``argv`` asks for, overridden and locked; fills the verb's own flags in ``extra``.

    Args:
      argv: arguments after the verb.
      extra: the verb's flags, already defined; must hold a string flag ``workdir``.

    Raises:
      UserError: unknown recipe, flag or config key (with the nearest known one), a value of the wrong type, a stray argument.
    """
    argv = [f"--config.{a}" if re.match(r"[A-Za-z_][\w.]*=", a) else a for a in argv]
    recipe, argv = _take_config(argv)
    overrides = [m[1] for a in argv if (m := re.match(r"--?(?:no)?config\.([^=]*)", a))]
    workdir = _peek(argv, "workdir")
    if recipe is None and workdir is None:
        raise UserError(
            "neither a recipe nor a run",
            expected="--config=RECIPE, or --workdir=RUN of an earlier run",
            where="--config",
            fix=f"Add --config={next(iter(recipes()), 'FILE.py')}",
        )
    config = load_saved(workdir) if recipe is None else load_recipe(recipe)
    for key in overrides:
        _check_key(config, key)

    argv = ["jprm", *argv]
    config_flags.DEFINE_config_dict("config", config, flag_values=extra, sys_argv=argv)
    try:
        rest = extra(argv)
    except flags.UnrecognizedFlagError as error:
        known = [n for n in extra if n != "config"] + [f"config.{k}" for k in keys(config)]
        guess = nearest(error.flagname, known)
        expected = f"one of {', '.join(f'--{name}' for name in extra)}, or --config.<key>"
        raise UserError(
            f"an unknown flag --{error.flagname}",
            expected=expected,
            where="command line",
            fix=f"Did you mean --{guess}" if guess else "See jprm <verb> --help",
        ) from error
    except flags.IllegalFlagValueError as error:
        raise _wrong_value(str(error), extra, config) from error
    except flags.Error as error:  # a flag without its value, an override that a later one would undo
        raise UserError(
            f"{error}", expected="--flag=value", where="command line", fix="Write the flag as --flag=value"
        ) from error
    if rest[1:]:
        raise UserError(
            f"a stray argument {rest[1]!r}",
            expected="flags (--name=value) and overrides (key=value)",
            where="command line",
            fix="Remove it, or give it a name",
        )
    if workdir is not None:
        with config.unlocked():
            config.workdir = workdir
    return config.lock()


def keys(config: ml_collections.ConfigDict, prefix: str = "") -> list[str]:
    """Dotted names of all fields and groups, in order."""
    out = []
    for name in config:
        out.append(prefix + name)
        if issubclass(config.get_type(name), ml_collections.ConfigDict):
            out += keys(config[name], f"{prefix}{name}.")
    return out


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a mistyped one: by the whole name, else by its last part (``lr`` -> ``rl.lr``)."""
    known = list(known)
    whole = difflib.get_close_matches(name, known, 1)
    if whole:
        return whole[0]
    last = difflib.get_close_matches(name.rpartition(".")[2], [k.rpartition(".")[2] for k in known], 1)
    return next((k for k in known if last and k.rpartition(".")[2] == last[0]), None)


def _take_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of --config, and the arguments without it."""
    value, rest, items = None, [], iter(argv)
    for item in items:
        if item in ("--config", "-config"):
            value = next(items, "")
        elif re.match(r"--?config=", item):
            value = item.partition("=")[2]
        else:
            rest.append(item)
    return value, rest


def _peek(argv: Sequence[str], name: str) -> str | None:
    """The value of one string flag, needed before the others can be parsed."""
    for item, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if re.match(rf"--?{name}=", item):
            return item.partition("=")[2]
        if item in (f"--{name}", f"-{name}"):
            return following
    return None


def _check_key(config: ml_collections.ConfigDict, key: str) -> None:
    known = keys(config)
    if key not in known:
        guess = nearest(key, known)
        raise UserError(
            "an unknown config key",
            expected=f"{guess!r}, the nearest known key" if guess else "a key of the config",
            where=f"config.{key}",
            fix=f"Write config.{guess}" if guess else f"Use one of the groups {', '.join(config)}",
        )
    group, _, name = key.rpartition(".")
    owner = config
    for part in filter(None, group.split(".")):
        owner = owner[part]
    if owner.get_type(name) in (type(None), list):
        raise UserError(
            f"a field of type {owner.get_type(name).__name__}",
            expected="a number, string, boolean or tuple",
            where=f"config.{key}",
            fix="Set this field in the recipe's file, not on the command line",
        )


def _wrong_value(message: str, extra: flags.FlagValues, config: ml_collections.ConfigDict) -> UserError:
    """absl's "flag --NAME=VALUE: why" as one of our errors."""
    name, value, why = re.match(r"flag --(.+?)=(.*?): (.*)", message, re.DOTALL).groups()
    if name.startswith("config."):
        *group, last = name.split(".")[1:]
        for part in group:
            config = config[part]
        kind = config.get_type(last).__name__
        wanted = f"{kind}, as in {config[last]!r}" if config[last] is not None else kind
    else:
        choices = getattr(extra[name].parser, "enum_values", None)
        wanted = "one of " + ", ".join(choices) if choices else extra[name].flag_type()
    return UserError(
        repr(value),
        expected=wanted,
        where=name if name.startswith("config.") else f"--{name}",
        fix="Write it as \"('a', 'b')\"" if wanted.startswith("tuple") else "Give a value of that type",
    )
