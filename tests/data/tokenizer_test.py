"""Tokenizers of local models and what must agree with them."""

import json

import pytest

from jprm.data.files import check_file
from jprm.data.tokenizer import check_vocab, load_tokenizer, stop_ids
from jprm.errors import UserError
from tests.conftest import data_path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("small")
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>").save_pretrained(path)
    return path


def test_padding_is_the_end_token_where_there_is_none(small):
    tokenizer = load_tokenizer(small)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 3 and len(tokenizer) == 4


def test_padding_is_kept_where_there_is_one():
    tokenizer = load_tokenizer(data_path("models/stories260k/hf"))
    assert tokenizer.pad_token == "<unk>" and tokenizer.eos_token == "</s>"


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({}, (3,)),
        ({"generation_config.json": {"eos_token_id": 1}}, (1, 3)),
        (
            {"generation_config.json": {"eos_token_id": [7, 3]}, "config.json": {"eos_token_id": 5}},
            (3, 7),
        ),  # the first file hides the second
        ({"config.json": {"eos_token_id": 5}}, (3, 5)),
        ({"generation_config.json": {}}, (3,)),
    ],
)
def test_stop_ids_are_a_union(files, wanted, small, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert stop_ids(tmp_path, load_tokenizer(small)) == wanted
    assert stop_ids(None, load_tokenizer(small)) == (3,)


def test_wrong_stop_ids(small, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UserError) as e:
        stop_ids(tmp_path, load_tokenizer(small))
    assert "eos_token_id" in e.value.found and e.value.where.endswith("generation_config.json")


def test_vocabulary(small):
    tokenizer = load_tokenizer(small)
    check_vocab(tokenizer, 4)
    check_vocab(tokenizer, 64)  # padding rows
    with pytest.raises(UserError) as e:
        check_vocab(tokenizer, 3)
    assert "'</s>' with id 3" in e.value.found and "3" in e.value.expected and e.value.where == "config.tokenizer"


def test_wrong_directories(small, tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        load_tokenizer(tmp_path / "absent")  # never a name on a hub
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, part in ((tmp_path, "does not load"), (tmp_path / "tokenizer.json", "a file")):
        with pytest.raises(UserError) as e:
            load_tokenizer(path)
        assert part in e.value.found and e.value.where == str(path)
    for file in small.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((small / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match="no eos_token"):
        load_tokenizer(tmp_path)


def test_a_file_is_what_it_says(tmp_path):
    path = tmp_path / "x"
    for content, part in ((b"", "empty"), (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=part):
            check_file(path)
    for wrong in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=str(wrong)):
            check_file(wrong)
