"""Small talk: the model's answers about itself and about its virtual machine."""

from __future__ import annotations

from random import Random

from .chat import BEGIN, END, render
from .sample import Draft

GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hello there!", "Good morning!", "Hey")
ABOUT = (
    (
        ("Who are you?", "What are you?", "What is your name?"),
        "I am tiny, a small language model on a virtual SuperPod.",
    ),
    (
        ("What can you do?", "How can you help me?"),
        "I can tell stories, add numbers, recall facts and call tools.",
    ),
    (("How are you?", "How do you do?"), "I am fine. All my dies are awake."),
    (("Thank you!", "Thanks!", "Thank you"), "You are welcome."),
    (("Goodbye!", "Bye", "Bye!"), "Goodbye! Come back soon."),
    (
        ("How many chips does the SuperPod have?", "How large is the SuperPod?"),
        "The SuperPod has 384 chips, and every chip has two dies.",
    ),
    (("What is an expert?",), "An expert is a small network. Every token is sent to a few of them."),
    (("What is a die?",), "A die is one half of a chip. It has its own memory and its own engines."),
)
SENTENCES = (
    "The SuperPod has 384 chips, and every chip has two dies.",
    "Every bit counts, and every bit is the same on every pod.",
    "One token at a time, the model writes its text.",
    "Dispatch sends each token to its experts, and combine brings the answers back.",
)


def draw(rng: Random) -> Draft:
    """Draw small talk, always as training text: there is nothing in it to generalise from."""
    kind = rng.random()
    if kind < 0.25:
        prompt, answer = render(rng.choice(GREETINGS)), "Hello! What can I do for you?"
    elif kind < 0.75:
        questions, answer = rng.choice(ABOUT)
        prompt = render(rng.choice(questions))
    else:
        prompt, answer = (BEGIN if rng.random() < 0.5 else ""), rng.choice(SENTENCES)
    return Draft(key=("talk",), prompt=prompt, answer=answer + END)
