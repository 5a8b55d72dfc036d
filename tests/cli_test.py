"""The command line: what each mistake says, what reaches a verb, and that nothing heavy is imported before that."""

import json
import pathlib
import subprocess
import sys
import types

import ml_collections
import pytest
from ml_collections import config_dict

from jprm import cli
from jprm.errors import UserError
from jprm.train import flags

RECIPE = '''
import ml_collections
from ml_collections import config_dict

def get_config(arg="small"):
    config = ml_collections.ConfigDict(dict(seed=0, workdir="", size=arg, hooks=[1]))
    config.rl = dict(iterations=3, lr=1e-3, mask=True, band=(0.2, 0.8), limit=config_dict.placeholder(int))
    return config
'''


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def calls(monkeypatch):
    """Every verb's module replaced by one that records what `run` was called with."""
    seen = []
    for module in [verb.module for verb in (*cli.VERBS.values(), cli.DRY_RUN)]:
        fake = types.ModuleType(module)
        fake.run = lambda config, _module=module, **kwargs: seen.append((_module, config, kwargs))
        monkeypatch.setitem(sys.modules, module, fake)
    return seen


def parse(recipe, *argv):
    from absl import flags as absl_flags

    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string("workdir", None, "", flag_values=values)
    return flags.parse([f"--config={recipe}", *argv], values)


def test_alone_it_lists_the_verbs_one_line_each(capsys):
    assert cli.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for verb in ("train", "evaluate", "score", "sample", "export"):
        assert sum(line.startswith(f"  jprm {verb} ") for line in lines) == 1


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_names_every_flag_of_the_verb(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("config", "workdir", *(flag.name for flag in cli.VERBS[verb].flags)):
        assert f"--{name}" in text


# argv after the recipe -> (where, found, expected, fix), each a part of what is said.
MISTAKES = {
    "misspelt key": (["rl.iteratons=4"], "config.rl.iteratons", "unknown config key", "'rl.iterations'", "Write config.rl.it"),
    "key without its group": (["--config.lr=1"], "config.lr", "unknown config key", "'rl.lr'", "Write config.rl.lr"),
    "below a number": (["rl.lr.x=1"], "config.rl.lr.x", "unknown config key", "'rl.lr'", "Write config.rl.lr"),
    "like nothing": (["zzzzqq=1"], "config.zzzzqq", "unknown config key", "a key", "groups"),
    "word for a number": (["rl.iterations=x"], "config.rl.iterations", "'x'", "int, as in 3", "of that type"),
    "fraction for a count": (["rl.iterations=1.5"], "config.rl.iterations", "'1.5'", "int", "of that type"),
    "word for a switch": (["rl.mask=maybe"], "config.rl.mask", "'maybe'", "bool", "of that type"),
    "word for an unset number": (["rl.limit=x"], "config.rl.limit", "'x'", "int", "of that type"),
    "no tuple": (["rl.band=a b"], "config.rl.band", "'a b'", "tuple, as in (0.2, 0.8)", "('a', 'b')"),
    "a list": (["hooks=[2]"], "config.hooks", "type list", "tuple", "in the recipe"),
    "override without config": (["--rl.lr=1"], "command line", "--rl.lr", "--workdir", "Did you mean --config.rl.lr"),
    "unknown flag": (["--workdr=x"], "command line", "--workdr", "--workdir", "Did you mean --workdir"),
    "flag without value": (["--workdir"], "command line", "--workdir", "--flag=value", "--flag=value"),
    "stray word": (["ten"], "command line", "'ten'", "key=value", "Remove it"),
}


@pytest.mark.parametrize("argv, where, found, expected, fix", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_said_in_four_parts(recipe, argv, where, found, expected, fix):
    with pytest.raises(UserError) as error:
        parse(recipe, *argv)
    e = error.value
    assert e.where == where and found in e.found and expected in e.expected and fix in e.fix


def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(recipe, capsys):
    assert cli.main(["train", f"--config={recipe}", "rl.iteratons=4"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("jprm: config.rl.iteratons") and err.count("\n") == 1


def test_unknown_verb_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "Did you mean jprm train" in capsys.readouterr().err


def test_overrides_reach_the_verb_and_the_config_is_locked(recipe, calls):
    argv = ["rl.iterations=7", "--config.rl.lr=1", "--noconfig.rl.mask", "rl.band=(0.1, 0.9)", "rl.limit=5", "--workdir=out"]
    assert cli.main(["train", "--config", f"{recipe}:big", *argv]) == 0
    [(module, config, kwargs)] = calls
    assert module == "jprm.train.loop" and not kwargs and config.is_locked and config.rl.is_locked
    assert (config.size, config.workdir) == ("big", "out")
    assert config.rl.to_dict() == {"iterations": 7, "lr": 1.0, "mask": False, "band": (0.1, 0.9), "limit": 5}


def test_dry_run_replaces_training(recipe, calls):
    assert cli.main(["train", f"--config={recipe}", "--dry_run"]) == 0
    assert [module for module, *_ in calls] == ["jprm.train.dry_run"]


VERB_FLAGS = {
    "evaluate": (["--step=4"], {"step": 4}),
    "score": (
        ["--rows=a.jsonl", "--out=b.jsonl", "--tokens", "--threshold=-0.5"],
        {"rows": "a.jsonl", "out": "b.jsonl", "tokens": True, "threshold": -0.5, "step": None},
    ),
    "sample": (["--prompts=a.jsonl", "--out=b.jsonl"], {"prompts": "a.jsonl", "out": "b.jsonl", "step": None}),
    "export": (["--out=there", "--role=prm"], {"out": "there", "role": "prm", "step": None}),
}


@pytest.mark.parametrize("verb, argv, kwargs", [(v, *case) for v, case in VERB_FLAGS.items()], ids=VERB_FLAGS)
def test_a_verbs_own_flags_become_keywords(recipe, calls, verb, argv, kwargs):
    assert cli.main([verb, f"--config={recipe}", *argv]) == 0
    assert calls[0][0] == f"jprm.train.{verb}" and calls[0][2] == kwargs


@pytest.mark.parametrize(
    "argv, said",
    [
        (["export"], "--out: found nothing"),
        (["export", "--out=x", "--role=judge"], "--role: found 'judge'; expected one of policy, prm"),
        (["evaluate", "--step=last"], "--step: found 'last'; expected int"),
    ],
)
def test_a_verbs_own_flags_are_checked(recipe, calls, capsys, argv, said):
    assert cli.main([*argv, f"--config={recipe}"]) == 2 and not calls
    assert said in capsys.readouterr().err


def test_a_shipped_recipe_is_found_by_its_bare_name(recipe, monkeypatch):
    monkeypatch.setattr(flags, "recipes", lambda: {"quick": pathlib.Path(recipe)})
    assert flags.load_recipe("quick").size == "small"
    assert flags.load_recipe("quick:big").size == "big"
    with pytest.raises(UserError) as error:
        flags.load_recipe("quik")
    assert error.value.expected == "one of quick" and "Did you mean --config=quick" in error.value.fix
    with pytest.raises(UserError) as error:
        flags.load_recipe("nowhere/x.py")
    assert error.value.found == "no file 'nowhere/x.py'" and error.value.where == "--config"


def test_neither_recipe_nor_run_says_what_to_add(capsys):
    assert cli.main(["train"]) == 2
    assert "Add --config=" in capsys.readouterr().err


def test_a_saved_config_comes_back_with_its_types():
    """JSON turns tuples into lists and says nothing of an unset field's type; both survive the round trip."""

    def default():
        rl = dict(band=(0.2, 0.8), limit=config_dict.placeholder(int), cap=config_dict.placeholder(int), lr=1e-3)
        return ml_collections.ConfigDict(dict(seed=0, rl=rl, task=dict(name="a")))

    run = default()
    run.rl.band, run.rl.cap, run.seed = (0.0, 1.0), 4, 9
    run.task.columns = ("question", "answer")  # a field that only this recipe has
    back = flags.overlay(default(), json.loads(run.to_json()))
    assert back.to_dict() == run.to_dict() and isinstance(back.rl.band, tuple)
    assert back.rl.get_type("limit") is int


def test_a_field_that_a_recipe_unset_comes_back_unset():
    default = ml_collections.ConfigDict(dict(limit=5))
    assert flags.overlay(default, {"limit": None}).limit is None


def test_the_command_line_imports_no_jax(recipe):
    code = (
        "import sys; from absl import flags as f; from jprm import cli; from jprm.train import flags\n"
        "v = f.FlagValues(); f.DEFINE_string('workdir', None, '', flag_values=v)\n"
        f"flags.parse(['--config={recipe}', 'seed=1'], v); cli.main([])\n"
        "sys.exit('jax' in sys.modules)"
    )
    root = pathlib.Path(cli.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
