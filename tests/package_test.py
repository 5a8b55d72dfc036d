"""House rules that a machine can check, over every file of the package."""

import ast
import pathlib
import re
import subprocess
import sys

import ml_collections
import pytest

import jprm
from jprm.train import flags
from jprm.train.config import default_config

PACKAGE = pathlib.Path(jprm.__file__).parent
FILES = [f for f in sorted(PACKAGE.rglob("*.py")) if "recipes" not in f.parts]
TREES = {f.relative_to(PACKAGE).as_posix(): ast.parse(f.read_text()) for f in FILES}
RECIPES = flags.recipes()
CONFIGS = {name: flags.load_recipe(name) for name in RECIPES} | {"default_config()": default_config()}

# A package may import those before it: `cli -> train -> {evals, tasks} -> {search, rl} -> reward -> model -> sharding`.
ORDER = [["errors"], ["data"], ["sharding"], ["model"], ["reward"], ["rl", "search"], ["tasks"], ["evals"], ["train"], ["cli"]]
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}


def test_the_quickstart_is_shipped():
    assert "quickstart" in RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_is_locked_and_says_how_to_run_it(name):
    config = flags.load_recipe(name)
    assert isinstance(config, ml_collections.ConfigDict) and config.is_locked
    doc = ast.get_docstring(ast.parse(RECIPES[name].read_text())) or ""
    assert f"jprm train --config={name}" in doc


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_field_can_be_overridden(config):
    """An unset field is a `placeholder(type)` and a sequence is a tuple: None and list have no meaning on a command line."""
    assert [key for key in leaves(config) if kind(config, key) in (type(None), list, dict)] == []


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_config_field_is_read_somewhere(config):
    read = set()
    for file, tree in TREES.items():
        if file != "train/config.py":  # where the defaults are set
            read |= set(names_read(tree))
    assert [key for key in leaves(config) if key.rpartition(".")[2] not in read] == []


def test_no_file_holds_more_than_one_idea():
    assert {f.name: n for f in FILES if (n := len(f.read_text().splitlines())) > 420} == {}


def test_every_mesh_names_its_axis_types():
    """Without them jax picks the mode, and its choice has changed between versions."""
    bare = []
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("jax.make_mesh", "jax.sharding.make_mesh"):
                if "axis_types" not in [k.arg for k in node.keywords]:
                    bare.append(f"{file}:{node.lineno}")
    assert bare == []


def test_imports_point_one_way():
    wrong = []
    for file, tree in TREES.items():
        here = re.split(r"[/.]", file)[0]
        for node in ast.walk(tree):
            for module in imported(node):
                there = module.split(".")[1] if module.startswith("jprm.") else None
                if there and here in LEVEL and there != here and LEVEL[there] >= LEVEL[here]:
                    wrong.append(f"{file}:{node.lineno} imports {module}")
    assert wrong == []


def test_importing_everything_needs_no_extra_and_starts_no_backend():
    """Every module, in one process of its own: a backend that starts at import breaks `jax.distributed`."""
    modules = ["jprm." + file.removesuffix(".py").replace("/", ".") for file in TREES if "__" not in file]
    code = f"""
import importlib, sys
for name in ("torch", "gguf", "math_verify", "reasoning_gym"):
    sys.modules[name] = None  # importing it now fails, as where the extra is not installed
for name in {modules!r}:
    importlib.import_module(name)
from jax._src import xla_bridge
sys.exit("a backend was started" if xla_bridge.backends_are_initialized() else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def leaves(config):
    every = flags.keys(config)
    return [k for k in every if not any(other.startswith(f"{k}.") for other in every)]


def kind(config, key):
    *groups, name = key.split(".")
    for group in groups:
        config = config[group]
    return config.get_type(name)


def names_read(tree):
    """Names that may read a config field: `.name`, `["name"]` or, through `**config.group`, a parameter or a dataclass field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"jprm.{a.name}" for a in node.names] if node.module == "jprm" else [node.module]
    return []
