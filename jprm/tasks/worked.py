r"""Short worked solutions for word problems: one equation a line, then the answer.

    8 + 3 = 11
    11 - 2 = 9
    Answer: 9

From the data's own equation where it has one. Where it has only the answer (MultiArith, AddSub), from a search over the numbers
of the question: a weak label, right in its arithmetic and its result, not certain to be what the author had in mind.
"""

import ast
import itertools
import operator
import re
from collections.abc import Iterator
from fractions import Fraction

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_DIGITS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_WORDS = {w: n for n, w in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())}
_DIGITS_OR_WORDS = re.compile(rf"{_DIGITS.pattern}|\b(?:{'|'.join(_WORDS)})\b", re.IGNORECASE)

_PRIMES = (1009, 2003, 3001, 4001, 5003, 6007)
MAX_NUMBERS = len(_PRIMES)  # a question with a table in it: a search would find something, and it would mean nothing

Step = tuple[Fraction, str, Fraction]


def from_equation(equation: str, answer: Fraction) -> str | None:
    """The steps of an equation such as "( ( 8.0 + 3.0 ) - 2.0 )"; None where it does not give the answer or is none."""
    steps: list[Step] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as number):
                return Fraction(str(number))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
                step = (value(left), _SIGNS[type(op)], value(right))
                steps.append(step)
                return _result(step)
        raise ValueError

    try:
        total = value(ast.parse(equation.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None
    return _written(steps, answer) if total == answer and steps else None


def from_numbers(question: str, answer: Fraction) -> str | None:
    """One or two operations on the numbers of a question that give its answer; None where there are none, or of several meanings.

    With three numbers or more, two operations on three different ones are tried first, then one operation. Two derivations mean
    the same if they agree on other numbers, too: (a + b) - c and a + (b - c) do; 2 + 2 and 2 * 2 do not, and give None.
    Numbers are digits; spelled-out ones up to twelve count where the digits alone do not suffice.
    """
    for pattern in (_DIGITS, _DIGITS_OR_WORDS):
        numbers = [_number(text) for text in pattern.findall(question)]
        if len(numbers) > MAX_NUMBERS:
            return None
        for length in (2, 1):
            found = [(steps, meaning) for steps, meaning in _derivations(numbers, length) if _result(steps[-1]) == answer]
            if len({meaning for _, meaning in found}) == 1:
                return _written(found[0][0], answer)
            if found:
                return None
    return None


def _derivations(numbers: list[Fraction], length: int) -> Iterator[tuple[list[Step], Fraction]]:
    """All chains of so many operations, each number used once, in the order of the question first, no value below zero.

    With each comes its meaning: its value where every number is replaced by another (equal ones by the same).
    """
    others = {number: Fraction(prime) for number, prime in zip(dict.fromkeys(numbers), _PRIMES)}
    for chosen in itertools.permutations(range(len(numbers)), length + 1):
        for signs in itertools.product(_OPERATIONS, repeat=length):
            for turned in itertools.product((False, True), repeat=length - 1):
                steps: list[Step] = []
                value, meaning = numbers[chosen[0]], others[numbers[chosen[0]]]
                for sign, index, turn in zip(signs, chosen[1:], (False, *turned), strict=True):
                    pair, other = (value, numbers[index]), (meaning, others[numbers[index]])
                    if turn:
                        pair, other = pair[::-1], other[::-1]
                    if sign == "/" and 0 in (pair[1], other[1]) or sign == "-" and pair[0] < pair[1]:
                        break
                    steps.append((pair[0], sign, pair[1]))
                    value, meaning = _result(steps[-1]), _OPERATIONS[sign](*other)
                else:
                    yield steps, meaning


def _result(step: Step) -> Fraction:
    return _OPERATIONS[step[1]](step[0], step[2])


def _number(text: str) -> Fraction:
    word = _WORDS.get(text.lower())
    return Fraction(text.replace(",", "")) if word is None else Fraction(word)


def _written(steps: list[Step], answer: Fraction) -> str | None:
    lines = []
    for step in steps:
        texts = [decimal_text(part) for part in (step[0], step[2], _result(step))]
        if None in texts:
            return None
        lines.append(f"{texts[0]} {step[1]} {texts[1]} = {texts[2]}")
    return "\n".join([*lines, f"Answer: {decimal_text(answer)}"])


def decimal_text(value: Fraction) -> str | None:
    """A number in at most four decimals, exactly; None where it needs more."""
    if (value * 10**4).denominator != 1:
        return None
    text = f"{float(value):.4f}".rstrip("0").rstrip(".") if value.denominator != 1 else str(value.numerator)
    return text
