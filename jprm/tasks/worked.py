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
from fractions import Fraction

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_DIGITS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_WORDS = {w: n for n, w in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())}
_DIGITS_OR_WORDS = re.compile(rf"{_DIGITS.pattern}|\b(?:{'|'.join(_WORDS)})\b", re.IGNORECASE)

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
    """One or two operations on the numbers of a question that give its answer; None where there are none, or of several kinds.

    With three numbers or more, two operations on three different ones are tried first, then one operation. Derivations that use
    other operations altogether (2 + 2 and 2 * 2) leave the meaning open and give None; (a + b) - c and a + (b - c) do not.
    Numbers are digits; spelled-out ones up to twelve count where the digits alone do not suffice.
    """
    for pattern in (_DIGITS, _DIGITS_OR_WORDS):
        numbers = [_number(text) for text in pattern.findall(question)]
        for length in (2, 1):
            found = [steps for steps in _derivations(numbers, length) if _result(steps[-1]) == answer]
            if len({tuple(sorted(step[1] for step in steps)) for steps in found}) == 1:
                return _written(found[0], answer)
            if found:
                return None
    return None


def _derivations(numbers: list[Fraction], length: int) -> list[list[Step]]:
    """All chains of so many operations, each number used once, in the order of the question first; no value below zero."""
    found = []
    for chosen in itertools.permutations(range(len(numbers)), length + 1):
        if len(numbers) > 6:  # a question with a table in it: a search would find something, and it would mean nothing
            break
        for signs in itertools.product(_OPERATIONS, repeat=length):
            if signs[0] in "+*" and chosen[0] > chosen[1]:
                continue
            for turned in itertools.product((False, True), repeat=length - 1):
                steps, value = [], numbers[chosen[0]]
                for position, (sign, index) in enumerate(zip(signs, chosen[1:], strict=True)):
                    pair = (value, numbers[index])
                    if position and turned[position - 1]:
                        if sign in "+*":
                            break
                        pair = pair[::-1]
                    if sign == "/" and not pair[1] or sign == "-" and pair[0] < pair[1]:
                        break
                    steps.append((pair[0], sign, pair[1]))
                    value = _result(steps[-1])
                else:
                    found.append(steps)
    return found


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
