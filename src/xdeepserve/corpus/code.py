"""Lines of Python: small functions from a description, and what a few assignments print."""

from __future__ import annotations

from random import Random

from .chat import BEGIN, END, render
from .sample import Draft

FUNCTIONS = "add scale shift change update step move apply compute value next score".split()
VARIABLES = "x y n a b k m value count total".split()
OPERATIONS = (("plus", "+"), ("minus", "-"), ("times", "*"))


def draw(rng: Random) -> Draft:
    """Draw a function, a loop or a short program."""
    return rng.choice((_function, _loop, _program))(rng)


def _function(rng: Random) -> Draft:
    name, variable = rng.choice(FUNCTIONS), rng.choice(VARIABLES)
    word, operator = rng.choice(OPERATIONS)
    number = rng.randint(1, 99)
    body = f"def {name}({variable}):\n    return {variable} {operator} {number}\n"
    key = ("function", name, variable, operator, number)
    if rng.random() < 0.3:
        begin = BEGIN if rng.random() < 0.5 else ""
        return Draft(key=key, prompt=f"{begin}# {name}: {variable} {word} {number}\n", answer=body + END)
    text = f"Write a function {name}({variable}) that returns {variable} {word} {number}."
    return Draft(key=key, prompt=render(text), answer=body + END)


def _loop(rng: Random) -> Draft:
    variable, count, factor = rng.choice(VARIABLES), rng.randint(2, 99), rng.randint(2, 9)
    body = f"for {variable} in range({count}):\n    print({variable} * {factor})\n"
    text = f"Write a loop that prints {variable} times {factor} for {variable} below {count}."
    return Draft(key=("loop", variable, count, factor), prompt=render(text), answer=body + END)


def _program(rng: Random) -> Draft:
    first, second = rng.sample(VARIABLES, 2)
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    program = f"{first} = {a}\n{second} = {first} + {b}\nprint({second})"
    text = f"What does this print?\n{program}"
    return Draft(key=("program", first, second, a, b), prompt=render(text), answer=f"{a + b}{END}")
