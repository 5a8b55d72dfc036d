"""Ids of prompts and responses, separators, and rows that do not fit."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from jprm.data.sequence import SequenceBuilder, fitting, separator_mask
from jprm.errors import UserError
from jprm.tasks.arithmetic import make_tokenizer
from tests.conftest import data_path


@pytest.fixture(scope="module")
def qwen():
    return AutoTokenizer.from_pretrained(data_path("tokenizers/qwen3"))


@pytest.fixture(scope="module")
def llama():
    return AutoTokenizer.from_pretrained(data_path("models/stories260k/hf"))


@pytest.fixture()
def characters():
    return make_tokenizer()


def test_plain_prompts_and_responses(characters):
    builder = SequenceBuilder(characters)
    ids, front = builder.encode("1+2=", "#3")
    assert not builder.chat and front == 4 and ids[-1] == characters.eos_token_id
    assert characters.decode(ids[:-1]) == "1+2=#3"
    assert builder.decode_response(ids[front:]) == "#3" and builder.decode_response([*ids[front:], *ids[front:]]) == "#3"
    assert builder.decode_response([ids[0], characters.pad_token_id, ids[0]]) == "1<pad>1"  # not "11"
    assert builder.decode_response(ids[front:], stop_ids=[ids[front + 1]]) == "#"


def test_bos_stays_in_front_of_the_prompt_only(llama):
    builder = SequenceBuilder(llama)
    ids, front = builder.encode("Once upon", " a time")
    assert ids[0] == llama.bos_token_id and llama.bos_token_id not in ids[1:]
    assert ids == builder.prompt_ids("Once upon") + builder.response_ids(" a time")


def test_chat_prompts(qwen):
    builder = SequenceBuilder(qwen, system="Be brief.")
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert builder.chat and qwen.decode(builder.prompt_ids("hi")) == text
    given = [{"role": "user", "content": "hi"}]
    assert builder.prompt_ids(given) == builder.prompt_ids("hi") and len(given) == 1  # the caller's list is left alone
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"}]
    assert "Mine." in qwen.decode(builder.prompt_ids(own)) and "Be brief." not in qwen.decode(builder.prompt_ids(own))
    assert SequenceBuilder(qwen, template="plain").prompt_ids("hi") == qwen("hi").input_ids


def test_the_joint_is_not_tokenised_again(qwen):
    """ "1" + "2" as text is one token in many vocabularies; "al" + "so" is one here."""
    builder = SequenceBuilder(qwen, template="plain")
    ids, front = builder.encode("al", "so")
    assert qwen("also").input_ids != ids[:-1] and qwen.decode(ids[:-1]) == "also"
    assert front == 1 and ids[:front] == builder.prompt_ids("al")


def test_a_response_ends_as_the_template_ends_a_turn(qwen):
    end = qwen.convert_tokens_to_ids("<|im_end|>")
    base = AutoTokenizer.from_pretrained(data_path("tokenizers/qwen3"))
    base.eos_token = "<|endoftext|>"  # as base models have it
    assert SequenceBuilder(base).end_id == end != base.eos_token_id
    assert SequenceBuilder(base, template="plain").end_id == base.eos_token_id
    assert SequenceBuilder(base).response_ids("x")[-1] == end


BAD = {
    "no such template": ({"template": "alpaca"}, "config.tokenizer.template", "template 'alpaca'"),
    "no template": ({"template": "chat"}, "config.tokenizer.template", "a tokenizer without a chat template"),
    "system in plain text": ({"system": "Be brief."}, "config.tokenizer.system", "a system prompt for plain text"),
}


@pytest.mark.parametrize("kwargs, where, found", BAD.values(), ids=BAD)
def test_bad_settings(characters, kwargs, where, found):
    with pytest.raises(UserError) as error:
        SequenceBuilder(characters, **kwargs)
    assert (error.value.where, error.value.found) == (where, found) and error.value.expected and error.value.fix


def test_template_that_refuses_a_system_prompt(characters):
    refuse = "{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    characters.chat_template = "{% for m in messages %}" + refuse + "{{ m.content }}{% endfor %}"
    assert SequenceBuilder(characters).prompt_ids("1+2=") == characters.encode("1+2=")
    with pytest.raises(UserError) as error:
        SequenceBuilder(characters, system="1").prompt_ids("1+2=")
    assert "no system here" in error.value.found and error.value.where == "config.tokenizer.system"


def test_messages_in_plain_text(characters):
    builder = SequenceBuilder(characters)
    assert builder.prompt_ids([{"role": "user", "content": "1+2="}]) == builder.prompt_ids("1+2=")
    with pytest.raises(UserError) as error:
        builder.prompt_ids([{"role": "system", "content": "1"}, {"role": "user", "content": "2"}])
    assert error.value.found == "a prompt of 2 messages" and error.value.where == "config.tokenizer.template"


# --- separators ------------------------------------------------------------------------------------------------------------


def test_separator_mask_of_characters(characters):
    mask = separator_mask(characters, ";", 32)
    assert mask.shape == (32,) and np.flatnonzero(mask).tolist() == characters.encode(";")


def test_separator_mask_sees_tokens_that_hold_more(qwen):
    mask = separator_mask(qwen, "\n", 151_936)
    for text in ("\n", ".\n", "\n\n", " }\n\n"):
        (token,) = qwen.encode(text)
        assert mask[token], text
    assert not mask[qwen.encode("n")[0]] and not mask[len(qwen) :].any() and not mask[qwen.all_special_ids].any()


def test_separator_mask_of_byte_fallback(llama):
    assert np.flatnonzero(separator_mask(llama, "\n")).tolist() == [llama.convert_tokens_to_ids("<0x0A>")]


@pytest.mark.parametrize("separator", ["\u043a\u0438", "", "eos", "\n"])
def test_separator_that_no_token_holds(characters, separator):
    with pytest.raises(UserError) as error:
        separator_mask(characters, separator)
    assert repr(separator) in error.value.found and error.value.where == "config.task.separator"
    assert error.value.fix == 'Set config.task.separator=";"'  # what this tokenizer has, not what it lacks


# --- length ----------------------------------------------------------------------------------------------------------------


def fit(rows, limit, policy):
    return fitting(rows, len, limit, policy=policy, what="prompts", where="config.sampling.max_prompt")


def test_rows_that_do_not_fit(caplog):
    caplog.set_level("INFO")
    assert fit(["a", "bbb", "cc"], 2, "drop") == [0, 2]
    assert "prompts: 1 of 3 dropped for more than 2 tokens (the longest has 3)" in caplog.text
    assert fit(["a", "bbb", "cc"], 3, "error") == [0, 1, 2] and fit([], 3, "error") == []


@pytest.mark.parametrize("rows, limit, policy", [(["a", "bbb"], 2, "error"), (["aaa", "bbb"], 2, "drop")])
def test_rows_too_long_are_refused(rows, limit, policy):
    with pytest.raises(UserError) as error:
        fit(rows, limit, policy)
    assert "too long" in error.value.found and "with 3 tokens" in error.value.found
    assert error.value.where == "config.sampling.max_prompt" and error.value.fix.startswith("Set config.sampling.max_prompt=3")
