"""Key-value recall: a list of facts, perhaps a story in between, then a question about one of the facts."""

from __future__ import annotations

from random import Random

from .chat import BEGIN, END, render
from .sample import NAMES, WORDS, Draft
from .stories import tell

FACTS = ("{name} has the {word}.", "The word of {name} is {word}.", "{name}: {word}")
QUESTIONS = ("What does {name} have?", "What is the word of {name}?", "{name}?")
ANSWERS = ("{name} has the {word}.", "The word of {name} is {word}.", "{name}: {word}")


def draw(rng: Random) -> Draft:
    """Draw 3 to 36 facts; long lists are rarer. The pair asked for decides the split."""
    count = rng.randint(3, 12) if rng.random() < 0.7 else rng.randint(13, 36)
    form = rng.randrange(len(FACTS))
    names, words = rng.sample(NAMES, count), rng.sample(WORDS, count)
    asked = rng.randrange(count)
    name, word = names[asked], words[asked]
    separator = "\n" if form == 2 else " "
    between = f"{tell(rng)}\n" if rng.random() < 0.2 else ""
    facts = separator.join(FACTS[form].format(name=n, word=w) for n, w in zip(names, words, strict=True))
    question, answer = QUESTIONS[form].format(name=name), ANSWERS[form].format(name=name, word=word)
    if rng.random() < 0.3:
        begin = BEGIN if rng.random() < 0.5 else ""
        prompt = f"{begin}{facts}\n{between}{question}\n"
    else:
        prompt = render(f"{facts}\n{between}{question}")
    return Draft(key=("recall", name, word), prompt=prompt, answer=answer + END)
