"""Chains of sums and differences: a task that needs no data and knows the truth of every step.

A prompt is a chain with an equals sign, a response is one equation per step and the answer:

    17+5-9+12=    ->    17+5=22;22-9=13;13+12=25;#25

All right-hand sides of a right derivation are >= 0: a "-" that would go below zero is drawn as "+". Demonstrations come careful
(one operation an equation) and careless (two operations merged into one equation, usually with a wrong result, from which the
rest then follows), so that a policy that imitates them has something to choose.
"""

import dataclasses
import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jprm.errors import UserError
from jprm.tasks.task import Problem, Task, Verdict, check_options

SEPARATOR = ";"
CHARACTERS = "0123456789+-=;#"
EVAL_SHARE = 0.1  # of all prompts, by hash
ANSWER_LIMIT = 10**8  # below 2**31 with room for one more digit: answers travel as i32
WRONG_BY = (-10, -3, -2, -1, 1, 2, 3, 10)

_EQUATION = re.compile(r"([0-9]+)((?:[+-][0-9]+){1,2})=(-?[0-9]+)")
_TERM = re.compile(r"[+-][0-9]+")
_ANSWER = re.compile(r"#(-?[0-9]+)")
_PROMPT = re.compile(r"([0-9]+)((?:[+-][0-9]+)+)=")


@dataclasses.dataclass(frozen=True)
class ChainOptions:
    """The knobs of the generator (`config.task.options`).

    Attributes:
      operations: number of sums and differences in a prompt.
      low, high: range of every operand, the first included, both ends in.
      careless: probability, at each step of a demonstration that has two operations left, of merging them into one equation.
      careless_wrong: probability that a merged equation states a wrong result.
      train_size, eval_size: problems in each split.
    """

    operations: int = 4
    low: int = 1
    high: int = 9
    careless: float = 0.4
    careless_wrong: float = 0.8
    train_size: int = 1_000_000
    eval_size: int = 1_000

    def __post_init__(self):
        def check(ok: bool, key: str, expected: str, fix: str) -> None:
            if not ok:
                where = f"config.task.options.{key}"
                raise UserError(f"{key} {getattr(self, key)!r}", expected=expected, where=where, fix=fix)

        check(self.operations >= 1, "operations", "at least 1", "Set it to 4")
        check(0 <= self.low, "low", "an operand of at least 0", "Set it to 1")
        check(self.low <= self.high, "high", f"at least low = {self.low}", f"Set it to {self.low} or more")
        limit = (ANSWER_LIMIT - 1) // (self.operations + 1)
        check(self.high <= limit, "high", f"at most {limit}, so that every answer fits in 32 bits", f"Set it to {limit} or less")
        for key in ("careless", "careless_wrong"):
            check(0.0 <= getattr(self, key) <= 1.0, key, "a probability in [0, 1]", "Set it to a value between 0 and 1")
        for key in ("train_size", "eval_size"):
            check(0 < getattr(self, key) < 2**31, key, "a number of problems in [1, 2**31)", "Set it to 1000")


class Chains(Sequence):
    """The problems of one split, made on access: item i is a pure function of (seed, split, i).

    The splits are disjoint by construction: the SHA-256 of a prompt decides which split it may appear in, whatever the seed, so a
    model trained under one seed has not seen the evaluation problems of another. Problems may repeat within a split.
    """

    def __init__(self, options: ChainOptions, seed: int, split: str):
        self.options, self.seed, self.split = options, seed, split

    def __len__(self) -> int:
        return self.options.eval_size if self.split == "eval" else self.options.train_size

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rng = random.Random(f"{self.seed}/{self.split}/{index}")  # seeded by SHA-512 of the string: the same on every machine
        for _ in range(10_000):
            prompt, answer = _draw_chain(rng, self.options)
            if is_eval(prompt) == (self.split == "eval"):
                return Problem(index=index, prompt=prompt, answer=str(answer), columns={"answer": answer})
        raise UserError(
            f"no {self.split} problem among 10,000 draws",
            expected=f"enough different prompts that {EVAL_SHARE:.0%} of them can be held out",
            where="config.task.options",
            fix="Raise operations or widen low..high",
        )


def _draw_chain(rng: random.Random, options: ChainOptions) -> tuple[str, int]:
    value = rng.randint(options.low, options.high)
    text = str(value)
    for _ in range(options.operations):
        operand = rng.randint(options.low, options.high)
        sign = "-" if rng.random() < 0.5 and value >= operand else "+"
        value += operand if sign == "+" else -operand
        text += f"{sign}{operand}"
    return text + "=", value


def is_eval(prompt: str) -> bool:
    """Whether a prompt is held out: its SHA-256 as a fraction of the largest lies below EVAL_SHARE."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8]) < EVAL_SHARE * 2**64


def _chain(prompt: str) -> tuple[int, list[int]]:
    """The first operand and the signed ones after it: "17+5-9=" -> (17, [5, -9])."""
    first, rest = _PROMPT.fullmatch(prompt).groups()
    return int(first), [int(term) for term in _TERM.findall(rest)]


def demonstration(problem: Problem, draw: int, *, options: ChainOptions, seed: int) -> str:
    """A derivation as people write them: a pure function of (seed, prompt, draw).

    While two operations are left, with probability `careless` both go into one equation, whose result is wrong with probability
    `careless_wrong` (off by one of WRONG_BY). What follows is right arithmetic from the value that stands there, so after one
    wrong equation the answer is wrong: a second never makes up for the first. Wrong values are chosen so that no later value
    falls below zero: a minus sign gives nothing away.
    """
    rng = random.Random(f"{seed}/{problem.prompt}/{draw}")
    value, terms = _chain(problem.prompt)
    steps, off = [], 0
    while terms:
        merged = len(terms) >= 2 and rng.random() < options.careless
        taken, terms = (terms[:2], terms[2:]) if merged else (terms[:1], terms[1:])
        result = value + sum(taken)
        if merged and rng.random() < options.careless_wrong:
            lowest, total = 0, 0
            for term in terms:
                total += term
                lowest = min(lowest, total)
            by = rng.choice([by for by in WRONG_BY if result + by + lowest >= 0 and off + by != 0])
            result, off = result + by, off + by
        steps.append(f"{value}{''.join(f'{term:+d}' for term in taken)}={result}")
        value = result
    return SEPARATOR.join([*steps, f"#{value}"])


def longest(options: ChainOptions) -> tuple[str, str]:
    """A prompt of the most characters, and a demonstration of it than which no prompt has a longer one.

    Every number that is written grows with every operand, so all operands are `high` and all signs "+". A merged equation is
    shorter than the two that it stands for, but its wrong result may bring all later values to another digit, the sooner the
    more of them: merges come first, and it remains to try how many.
    """
    operand, total = f"+{options.high}", options.operations
    off = max(WRONG_BY) if options.careless_wrong else 0

    def written(merges: int) -> str:
        value, steps = options.high, []
        for taken in [2] * merges + [1] * (total - 2 * merges):
            result = value + taken * options.high + (off if taken == 2 else 0)
            steps.append(f"{value}{operand * taken}={result}")
            value = result
        return SEPARATOR.join([*steps, f"#{value}"])

    fewest, most = total // 2 if options.careless == 1.0 else 0, total // 2 if options.careless else 0
    return f"{options.high}{operand * total}=", max(map(written, range(fewest, most + 1)), key=len)


def first_error(problem: Problem, response: str) -> int:
    """The first wrong step of a response, against the truth.

    Steps are the pieces between separators. An equation is right iff it is arithmetically right *and* continues the chain: its
    left side is the value reached so far and the next one or two operations. The answer step `#25` is right iff all operations
    are used and the value is theirs. A response that ends without an answer is wrong at its last step, the one that stopped;
    whatever stands after an answer is wrong too.

    Returns:
      The 0-based index of the first wrong step; -1 if there is none.
    """
    value, terms = _chain(problem.prompt)
    pieces = response.split(SEPARATOR)
    for index, piece in enumerate(pieces):
        if answer := _ANSWER.fullmatch(piece):
            if terms or int_or_none(answer[1]) != value:
                return index
            return index + 1 if index + 1 < len(pieces) else -1
        equation = _EQUATION.fullmatch(piece)
        if equation is None:
            return index
        used = _TERM.findall(equation[2])
        right = value + sum(terms[: len(used)])
        if (
            int_or_none(equation[1]) != value
            or [int_or_none(term) for term in used] != terms[: len(used)]
            or int_or_none(equation[3]) != right
        ):
            return index
        value, terms = right, terms[len(used) :]
    return len(pieces) - 1


def int_or_none(digits: str) -> int | None:
    """The integer a text of ASCII digits spells, or None where it is so long that it cannot be one of ours.

    (`int` refuses more than 4,300 digits, and a policy may well write them.)
    """
    stripped = digits.lstrip("+-").lstrip("0")
    return None if len(stripped) > 18 else int(digits[:1].strip("0123456789") + (stripped or "0"))


def verify(problems: Sequence[Problem], responses: Sequence[str], response_ids: Any = None) -> list[Verdict]:
    """1 where what stands after the last `#` is an integer, minus sign and leading zeros allowed, that equals the answer."""
    del response_ids  # the text is all that counts
    verdicts = []
    for problem, text in zip(problems, responses, strict=True):
        match = re.fullmatch(r"[\s\S]*#(-?[0-9]+)", text)
        verdicts.append(Verdict(float(match is not None and int_or_none(match[1]) == int(problem.answer))))
    return verdicts


def device_verifier(
    tokenizer: Any,
) -> Callable[[jax.Array, jax.Array, jax.Array, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]:
    """`verify` on token ids, as a pure JAX function for the tasks whose whole iteration is one program.

    Args:
      tokenizer: a tokenizer in which each of CHARACTERS is one id (`make_tokenizer`, or one with single digits).

    Returns:
      f(tokens i32[R,T], prompt_lengths i32[R], lengths i32[R], columns) -> (outcome f32[R] in {0, 1}, known bool[R], all True).
      `columns["answer"]` is i32[R]. A response runs to its first EOS, or to `lengths` where it has none; any token but a digit
      after the last `#` makes it wrong, special tokens included.

    Raises:
      UserError: a character is not one id of its own in this tokenizer.
    """
    ids = {}
    for character in CHARACTERS:
        found = tokenizer.encode(character, add_special_tokens=False)
        if len(found) != 1:
            raise UserError(
                f"{len(found)} ids for {character!r}",
                expected="one id for each of " + CHARACTERS,
                where="config.tokenizer",
                fix="Use the tokenizer of the arithmetic task",
            )
        ids[character] = found[0]
    digit_ids = np.array([ids[c] for c in "0123456789"], np.int32)  # no device array: a dry run makes verifiers, too
    mark_id, minus_id, eos_id = ids["#"], ids["-"], tokenizer.eos_token_id

    def verify_tokens(tokens, prompt_lengths, lengths, columns):
        position = jnp.arange(tokens.shape[1])
        response = (position >= prompt_lengths[:, None]) & (position < lengths[:, None])
        ended = jnp.cumsum(response & (tokens == eos_id), axis=1) > 0
        response &= ~ended
        end = jnp.max(jnp.where(response, position, -1), axis=1, keepdims=True)  # last token of the text
        mark = jnp.max(jnp.where(response & (tokens == mark_id), position, -1), axis=1, keepdims=True)
        after = response & (position > mark) & (mark >= 0)
        minus = after & (position == mark + 1) & (tokens == minus_id)
        is_digit = tokens[..., None] == digit_ids
        number = after & ~minus
        well_formed = jnp.any(number, axis=1) & jnp.all(~number | jnp.any(is_digit, axis=-1), axis=1)

        # Digits weigh by their place from the end, all at once. Nine places fit in 31 bits; a digit other than 0 further left
        # makes the number larger than any answer, so it is noted rather than multiplied, which would wrap around.
        place = end - position
        digit = jnp.where(number, jnp.argmax(is_digit, axis=-1), 0)
        value = jnp.sum(jnp.where(place < 9, digit * 10 ** jnp.clip(place, 0, 8), 0), axis=1)
        too_large = jnp.any((place >= 9) & (digit > 0), axis=1)
        value = jnp.where(jnp.any(minus, axis=1), -value, value)
        outcome = well_formed & ~too_large & (value == columns["answer"])
        return outcome.astype(jnp.float32), jnp.ones_like(outcome)

    return verify_tokens


def make_tokenizer() -> Any:
    """One id per character, and distinct pad, bos and eos: a `transformers` fast tokenizer that loads with `AutoTokenizer`.

    It adds no special token by itself. A character outside CHARACTERS becomes `<unk>` rather than nothing.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def arithmetic_task(options: Mapping[str, Any], *, seed: int = 0, separator: str | None = None) -> Task:
    """The chain task.

    Args:
      options: overrides of ChainOptions.
      seed: of problems and demonstrations.
      separator: `config.task.separator`; empty, or the task's own ";".

    Raises:
      UserError: an unknown option, a value out of range, or a separator other than the one the derivations are written with.
    """
    check_options(options, [field.name for field in dataclasses.fields(ChainOptions)])
    if separator and separator != SEPARATOR:
        raise UserError(
            f"separator {separator!r}",
            expected=f"{SEPARATOR!r}, which ends the steps of this task",
            where="config.task.separator",
            fix=f"Set config.task.separator={SEPARATOR!r}",
        )
    chains = ChainOptions(**options)
    train, held_out = Chains(chains, seed, "train"), Chains(chains, seed, "eval")
    train[0], held_out[0]  # a range too small to hold anything out is refused here, not in the middle of a run
    return Task(
        name="arithmetic",
        train=train,
        eval=held_out,
        separator=SEPARATOR,
        verify=verify,
        demonstration=lambda problem, draw: demonstration(problem, draw, options=chains, seed=seed),
        first_error=first_error,
        device_verifier=device_verifier,
        make_tokenizer=make_tokenizer,
        longest=longest(chains),
    )
