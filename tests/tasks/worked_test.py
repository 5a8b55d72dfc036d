"""Short worked solutions: from equations, and from the numbers of a question."""

from fractions import Fraction

import pytest

from jprm.tasks.worked import decimal_text, from_equation, from_numbers

EQUATIONS = {
    "one": ("( 290.0 / 2.0 )", 145, "290 / 2 = 145\nAnswer: 145"),
    "nested left": ("( ( 8.0 + 3.0 ) - 2.0 )", 9, "8 + 3 = 11\n11 - 2 = 9\nAnswer: 9"),
    "nested right": ("( 9.0 - ( 2.0 * 3.0 ) )", 3, "2 * 3 = 6\n9 - 6 = 3\nAnswer: 3"),
    "decimals": ("( 0.5 + 0.25 )", Fraction(3, 4), "0.5 + 0.25 = 0.75\nAnswer: 0.75"),
    "another result": ("( 8.0 + 3.0 )", 12, None),
    "no operation": ("5.0", 5, None),
    "division by zero": ("( 1.0 / 0.0 )", 1, None),
    "endless decimals": ("( ( 1.0 / 3.0 ) * 3.0 )", 1, None),
    "power tower": ("9**9**9**9", 1, None),
    "call": ("print(1)", 1, None),
    "no equation": ("8 +", 8, None),
    "empty": ("", 1, None),
}


@pytest.mark.parametrize("equation, answer, text", EQUATIONS.values(), ids=EQUATIONS)
def test_from_equation(equation, answer, text):
    assert from_equation(equation, Fraction(answer)) == text


QUESTIONS = {
    "one": ("Tim had 28 bales and now 54. How many did he add?", 26, "54 - 28 = 26\nAnswer: 26"),
    "two": ("32 pieces and 42 pieces, ate 35. How many left?", 39, "32 + 42 = 74\n74 - 35 = 39\nAnswer: 39"),
    "sum times": ("6 dollars each, 3 decks and 6 decks?", 54, "6 + 3 = 9\n9 * 6 = 54\nAnswer: 54"),
    "all numbers before some": ("7 and 3 and 6?", 10, "7 - 3 = 4\n4 + 6 = 10\nAnswer: 10"),
    "distractor": ("75 seashells and 14 starfish, 62 seashells left?", 13, "75 - 62 = 13\nAnswer: 13"),
    "thousands": ("1,200 and 300?", 1500, "1200 + 300 = 1500\nAnswer: 1500"),
    "spelled out": ("Two hens lay 3 eggs each. How many?", 6, "2 * 3 = 6\nAnswer: 6"),
    "open meaning": ("2 and 2?", 4, None),
    "nothing fits": ("7 and 9?", 100, None),
    "no numbers": ("How many?", 3, None),
    "table": ("1 2 3 4 5 6 7 8 9 10?", 3, None),
    "never below zero": ("3 and 5 and 9?", 7, "3 + 9 = 12\n12 - 5 = 7\nAnswer: 7"),
}


@pytest.mark.parametrize("question, answer, text", QUESTIONS.values(), ids=QUESTIONS)
def test_from_numbers(question, answer, text):
    assert from_numbers(question, Fraction(answer)) == text


def test_decimal_text():
    values = ["5", "-5", "0.5", "12.3400", "1/3", "0.00001", "100"]
    assert [decimal_text(Fraction(v)) for v in values] == ["5", "-5", "0.5", "12.34", None, None, "100"]
