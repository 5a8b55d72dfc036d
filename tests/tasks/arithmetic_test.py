"""The chain task: its generator, its truth of steps, its tokenizer, and the two verifiers against each other."""

import dataclasses
import itertools
import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jprm.errors import UserError
from jprm.tasks.arithmetic import (
    CHARACTERS,
    ChainOptions,
    Chains,
    arithmetic_task,
    demonstration,
    device_verifier,
    first_error,
    is_eval,
    longest,
    make_tokenizer,
    verify,
)
from jprm.tasks.task import Problem

PROBLEM = Problem(index=0, prompt="17+5-9+12=", answer="25", columns={"answer": 25})


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


# --- the generator ---------------------------------------------------------------------------------------------------------


def test_problems_are_a_pure_function_of_seed_split_and_index():
    one, two, other = (arithmetic_task({}, seed=s) for s in (3, 3, 4))
    assert [one.train[i] for i in (5, 0, 999_999)] == [two.train[i] for i in (5, 0, 999_999)]
    assert one.train[5] != other.train[5] and one.train[5].prompt != one.eval[5].prompt


def test_splits_are_disjoint_whatever_the_seed():
    train = {p.prompt for seed in (0, 1) for p in (Chains(ChainOptions(operations=2), seed, "train")[i] for i in range(1500))}
    held_out = {p.prompt for seed in (0, 1) for p in (Chains(ChainOptions(operations=2), seed, "eval")[i] for i in range(400))}
    assert len(train) > 500 and len(held_out) > 80
    assert not train & held_out
    assert not any(map(is_eval, train)) and all(map(is_eval, held_out))


LONGEST = {  # a careless demonstration may be the longest: its +10 brings zeros to two digits, and all that follow
    "careful": dict(operations=3, low=8, high=9),
    "careless": dict(operations=5, low=0, high=0, careless=0.5),
    "always careless": dict(operations=3, low=4, high=5, careless=1.0, careless_wrong=1.0),
    "never wrong": dict(operations=4, low=0, high=0, careless=0.5, careless_wrong=0.0),
    "never careless": dict(operations=4, low=0, high=0, careless=0.0),
    "over the hundred": dict(operations=4, low=31, high=32, careless=0.3, careless_wrong=1.0),
}


@pytest.mark.parametrize("options", LONGEST.values(), ids=LONGEST)
def test_no_row_is_longer_than_the_longest(options):
    """… and some are as long."""
    options = ChainOptions(**options)
    prompt, response = longest(options)
    task = arithmetic_task(dataclasses.asdict(options))
    assert task.longest == (prompt, response) and max(len(task.eval[i].prompt) for i in range(20)) <= len(prompt)
    numbers = range(options.low, options.high + 1)
    chains = itertools.product(numbers, *[[f"{sign}{n}" for sign in "+-" for n in numbers]] * options.operations)
    prompts = [f"{first}{''.join(rest)}=" for first, *rest in chains]
    prompts = [p for p in prompts if min(np.cumsum([int(x) for x in p[:-1].replace("-", "+-").split("+")])) >= 0]
    assert max(map(len, prompts)) == len(prompt) and prompt in prompts
    texts = (demonstration(Problem(0, p, "", {}), draw, options=options, seed=0) for p in prompts for draw in range(2))
    more = (demonstration(Problem(0, prompt, "", {}), draw, options=options, seed=1) for draw in range(3000))
    assert max(len(text) for text in itertools.chain(texts, more)) == len(response)


def test_prompts_are_right_and_in_range():
    task = arithmetic_task({"operations": 3, "low": 2, "high": 30})
    for i in range(200):
        problem = task.train[i]
        terms = problem.prompt[:-1].replace("-", "+-").split("+")
        partial = np.cumsum([int(t) for t in terms])
        assert len(terms) == 4 and all(2 <= abs(int(t)) <= 30 for t in terms)
        assert partial.min() >= 0 and problem.answer == str(partial[-1]) and problem.columns["answer"] == partial[-1]


def test_index_past_the_end_is_an_index_error():
    task = arithmetic_task({"eval_size": 3})
    assert len(list(task.eval)) == 3
    with pytest.raises(IndexError):
        task.eval[3]


BAD_OPTIONS = {
    "unknown": ({"operatons": 3}, "option 'operatons'", "Use 'operations'"),
    "no operation": ({"operations": 0}, "operations 0", "Set it to 4"),
    "empty range": ({"low": 5, "high": 4}, "high 4", "Set it to 5 or more"),
    "answers beyond 32 bits": ({"high": 10**9}, "high 1000000000", "Set it to 19999999 or less"),
    "not a probability": ({"careless": 1.5}, "careless 1.5", "Set it to a value between 0 and 1"),
    "nothing left": ({"operations": 1, "high": 1}, "no eval problem among 10,000 draws", "Raise operations or widen low..high"),
}


@pytest.mark.parametrize("options, found, fix", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options(options, found, fix):
    with pytest.raises(UserError) as error:
        arithmetic_task(options)
    assert (error.value.found, error.value.fix) == (found, fix)
    assert error.value.where.startswith("config.task.options") and error.value.expected


def test_separator_of_another_kind_is_refused():
    with pytest.raises(UserError) as error:
        arithmetic_task({}, separator="\n")
    assert error.value.where == "config.task.separator" and error.value.found == "separator '\\n'"


# --- demonstrations and the truth of steps ---------------------------------------------------------------------------------


def test_careful_demonstrations_are_right_everywhere():
    task = arithmetic_task({"careless": 0.0})
    for i in range(100):
        text = task.demonstration(task.train[i], i)
        assert len(text.split(";")) == 5 and first_error(task.train[i], text) == -1
        assert verify([task.train[i]], [text])[0].score == 1.0


def test_careless_demonstrations_have_the_stated_rates_and_no_minus_sign_in_a_result():
    task = arithmetic_task({})
    texts = [(p := task.train[i], task.demonstration(p, 7)) for i in range(3000)]
    right = np.mean([v.score for v in verify(*zip(*texts))])
    # Right with probability f(4): f(0) = f(1) = 1, f(n) = .6 f(n-1) + .4 x .2 f(n-2).
    assert abs(right - 0.3472) < 4 * np.sqrt(0.3472 * 0.6528 / 3000)
    for problem, text in texts:
        wrong = first_error(problem, text)
        assert (wrong == -1) == bool(verify([problem], [text])[0].score)
        assert "=-" not in text and "#-" not in text
        if wrong >= 0:
            assert text.split(";")[wrong].count("+") + text.split(";")[wrong].count("-") == 2  # only merged equations go wrong


def test_draws_differ_and_repeat():
    task = arithmetic_task({})
    draws = [task.demonstration(task.train[0], d) for d in range(20)]
    assert len(set(draws)) > 3 and draws == [task.demonstration(task.train[0], d) for d in range(20)]


FIRST_ERRORS = {
    "right": ("17+5=22;22-9=13;13+12=25;#25", -1),
    "merged and right": ("17+5-9=13;13+12=25;#25", -1),
    "leading zeros": ("17+5=022;22-9=13;13+12=25;#025", -1),
    "wrong sum": ("17+5=23;23-9=14;14+12=26;#26", 0),
    "second is wrong": ("17+5=22;22-9=14;14+12=26;#26", 1),
    "right sum, wrong operand": ("17+5=22;22-8=14;14+12=26;#26", 1),
    "right sum, does not continue": ("17+5=22;23-9=14;14+12=26;#26", 1),
    "right value from another left side": ("17+5=22;21-9=13;13+12=25;#25", 1),
    "operation skipped": ("17+5=22;22+12=34;#34", 1),
    "operations in another order": ("17+5=22;22+12-9=25;#25", 1),
    "three at once": ("17+5-9+12=25;#25", 0),
    "answer too early": ("17+5=22;22-9=13;#13", 2),
    "answer differs": ("17+5=22;22-9=13;13+12=25;#24", 3),
    "answer only": ("#25", 0),
    "text after the answer": ("17+5=22;22-9=13;13+12=25;#25;#25", 4),
    "two marks": ("17+5=22;22-9=13;13+12=25;#25#25", 3),
    "cut inside a step": ("17+5=22;22-", 1),
    "stops without an answer": ("17+5=22;22-9=13;13+12=25", 2),
    "stops after a separator": ("17+5=22;", 1),
    "one operation too many": ("17+5=22;22-9=13;13+12=25;25+1=26;#26", 3),
    "empty": ("", 0),
    "digits without end": ("17+5=" + "9" * 5000, 0),
}


@pytest.mark.parametrize("response, index", FIRST_ERRORS.values(), ids=FIRST_ERRORS)
def test_first_error(response, index):
    assert first_error(PROBLEM, response) == index


# --- the tokenizer ---------------------------------------------------------------------------------------------------------


def test_tokenizer_round_trip_through_a_saved_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for tok in (tokenizer, loaded):
        ids = tok.encode(CHARACTERS + "17+5=22;#25")
        assert len(ids) == len(CHARACTERS) + 11 and tok.decode(ids) == CHARACTERS + "17+5=22;#25"
        assert len({tok.pad_token_id, tok.bos_token_id, tok.eos_token_id, tok.unk_token_id}) == 4
        assert tok.encode("1x2")[1] == tok.unk_token_id
    assert loaded.get_vocab() == tokenizer.get_vocab()


# --- the verifier on the device --------------------------------------------------------------------------------------------

RESPONSES = {
    "right": ("1+2=3;#25", 1),
    "leading zeros": ("#0025", 1),
    "many leading zeros": ("#" + "0" * 25 + "25", 1),
    "no mark": ("25", 0),
    "two marks, last right": ("#24#25", 1),
    "two marks, last wrong": ("#25#24", 0),
    "doubled mark": ("##25", 1),
    "mark at the end": ("#25#", 0),
    "negative": ("#-25", 0),
    "two signs": ("#--25", 0),
    "sign only": ("#-", 0),
    "plus": ("#+25", 0),
    "digits then more": ("#25;", 0),
    "2**32 + 25": ("#4294967321", 0),
    "10**9 + 25": ("#1000000025", 0),
    "2**64 + 25": ("#18446744073709551641", 0),
    "overlong": ("#" + "9" * 40, 0),
    "empty": ("", 0),
    "mark only": ("#", 0),
}


def _on_device(tokenizer, rows, answers, eos, width=64):
    """Token arrays as a sampler leaves them: a prompt that holds a mark, the response, EOS or not, and junk in the padding."""
    tokens = np.full((len(rows), width), tokenizer.encode("5")[0], np.int32)
    prompt = tokenizer.encode("#7=")
    lengths, prompt_lengths = [], []
    for r, row in enumerate(rows):
        front = prompt[: 1 + r % 3]
        ids = [*front, *tokenizer.encode(row), *([tokenizer.eos_token_id] if eos else [])]
        tokens[r, : len(ids)] = ids
        lengths.append(len(ids))
        prompt_lengths.append(len(front))
    check = jax.jit(device_verifier(tokenizer))
    return check(tokens, np.array(prompt_lengths), np.array(lengths), {"answer": np.array(answers, np.int32)})


@pytest.mark.parametrize("eos", [True, False], ids=["eos", "cut off"])
def test_device_verifier_table(tokenizer, eos):
    texts, expected = zip(*RESPONSES.values())
    outcome, known = _on_device(tokenizer, texts, [25] * len(texts), eos)
    assert dict(zip(RESPONSES, outcome.tolist())) == dict(zip(RESPONSES, map(float, expected)))
    assert [v.score for v in verify([PROBLEM] * len(texts), texts)] == outcome.tolist()
    assert known.dtype == bool and bool(known.all()) and outcome.dtype == np.float32


def test_negative_answers_agree_too(tokenizer):
    problem = Problem(index=0, prompt="1-3=", answer="-2")
    texts = ["#-2", "#2", "#-002", "#-3", "#-4294967294"]
    outcome, _ = _on_device(tokenizer, texts, [-2] * 5, True)
    assert outcome.tolist() == [v.score for v in verify([problem] * 5, texts)] == [1, 0, 1, 0, 0]


def test_text_ends_at_the_first_eos(tokenizer):
    e, ids = tokenizer.eos_token_id, tokenizer.encode("#25")
    zero, pad = tokenizer.encode("0")[0], tokenizer.pad_token_id
    tokens = np.array([[zero, *ids, e, *ids, zero][:8], [zero, *ids, zero, e, e, e], [zero, ids[0], pad, *ids[1:], e, e, e]])
    outcome, _ = jax.jit(device_verifier(tokenizer))(tokens, np.ones(3, int), np.full(3, 8), {"answer": np.full(3, 25)})
    assert outcome.tolist() == [1.0, 0.0, 0.0]  # right before EOS; "#250"; a special token within the number


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_device_verifier_agrees_with_the_host_on_noise(tokenizer, seed):
    rng = random.Random(seed)
    answers = [rng.choice([0, 7, 25, -3]) for _ in range(64)]
    texts = ["".join(rng.choices("0257##--;=+9", k=rng.randrange(0, 12))) + rng.choice(["", f"#{a}", f"#0{a}"]) for a in answers]
    outcome, _ = _on_device(tokenizer, texts, answers, bool(seed % 2))
    problems = [Problem(index=0, prompt="", answer=str(a)) for a in answers]
    assert outcome.tolist() == [v.score for v in verify(problems, texts)]


def test_tokenizer_that_merges_digits_is_refused():
    class Merging:
        eos_token_id = 0

        def encode(self, text, add_special_tokens):
            return [1, 2]

    with pytest.raises(UserError) as error:
        device_verifier(Merging())
    assert error.value.found == "2 ids for '0'" and error.value.where == "config.tokenizer"
