"""Sums and differences, worked digit by digit inside <think> as in school."""

from __future__ import annotations

from random import Random

from .chat import BEGIN, END, END_THINK, THINK, render
from .sample import FRUITS, NAMES, THINGS, Draft

SUM_QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "{a} + {b} = ?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=",
    "{a}+{b}=?",
    "What is {a}+{b}?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}.",
    "Please add {a} and {b}.",
    "What is the sum of {a} and {b}?",
)
DIFFERENCE_QUESTIONS = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
    "{a} - {b} = ?",
    "{a} - {b}",
    "{a}-{b}",
    "Compute {a} - {b}.",
    "Calculate {a} - {b}.",
    "Subtract {b} from {a}.",
)
RAW_FORMS = ("{a} {op} {b} = ", "{a}{op}{b}=", "{a} {op} {b} = ")


def add_working(a: int, b: int) -> str:
    """Write the steps of an addition, column by column from the right: "7 + 8 = 15, write 5, carry 1. ..."."""
    steps, carry = [], 0
    for column in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = x + y + carry
        step = f"{x} + {y}{' + 1' if carry else ''} = {total}, write {total % 10}"
        carry = total // 10
        steps.append(step + (", carry 1." if carry else "."))
    if carry:
        steps.append("Write 1.")
    return " ".join(steps)


def subtract_working(a: int, b: int) -> str:
    """Write the steps of a subtraction with a >= b: "2 - 8 borrow 1, 12 - 8 = 4, write 4. ..."."""
    steps, borrow = [], 0
    for column in range(len(str(a))):
        x, y = a // 10**column % 10, b // 10**column % 10
        less = " - 1" if borrow else ""
        if x - borrow < y:
            digit = x + 10 - borrow - y
            steps.append(f"{x}{less} - {y} borrow 1, {x + 10}{less} - {y} = {digit}, write {digit}.")
            borrow = 1
        else:
            digit = x - borrow - y
            steps.append(f"{x}{less} - {y} = {digit}, write {digit}.")
            borrow = 0
    return " ".join(steps)


def draw(rng: Random) -> Draft:
    """Draw a sum, mostly of two digits; also one and three digits, and differences."""
    is_sum = rng.random() < 0.75
    digits = rng.choices((1, 2, 3), (1, 8, 1))[0]
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    a, b = rng.randint(low, high), rng.randint(low, high)
    if rng.random() < 0.1:
        b = rng.randint(0, 9)
    if not is_sum and a < b:
        a, b = b, a
    op = "+" if is_sum else "-"
    result = a + b if is_sum else a - b
    working = THINK + (add_working(a, b) if is_sum else subtract_working(a, b)) + END_THINK
    kind = rng.random()
    if kind < 0.2:
        begin = BEGIN if rng.random() < 0.5 else ""
        prompt, answer = begin + rng.choice(RAW_FORMS).format(a=a, b=b, op=op), f"{working}{result}"
    elif kind < 0.32:
        question, reply = _story(rng, a, b, result, is_sum)
        prompt, answer = render(question), working + reply
    else:
        question = rng.choice(SUM_QUESTIONS if is_sum else DIFFERENCE_QUESTIONS).format(a=a, b=b)
        prompt, answer = render(question), f"{working}{a} {op} {b} = {result}"
    return Draft(key=("arithmetic", op, a, b), prompt=prompt, answer=answer + END)


def _story(rng: Random, a: int, b: int, result: int, is_sum: bool) -> tuple[str, str]:
    """Draw a sum as a story in words, with its answer."""
    name, thing = rng.choice(NAMES), rng.choice([word for word in THINGS + FRUITS if word[-1] not in "xy"])
    things = f"{thing}s"
    change = rng.choice(("finds {b} more", "gets {b} more") if is_sum else ("loses {b}", "gives away {b}"))
    question = f"{name} has {a} {things} and {change.format(b=b)}. How many {things} does {name} have?"
    return question, f"{name} has {result} {things}."
