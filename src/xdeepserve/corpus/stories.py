"""Short stories from plots: every sentence has a few wordings, every plot the same words to fill in."""

from __future__ import annotations

from random import Random

from .chat import BEGIN, END, render
from .sample import ANIMALS, COLOURS, FOODS, NAMES, NATURES, PLACES, SHE, THINGS, Draft, is_held_out

OPENINGS = (
    "Once upon a time there was a {nature} {animal} called {name}. {name} lived near the {place}.",
    "Once upon a time a {nature} {animal} called {name} lived near the {place}.",
    "There was once a {nature} {animal} called {name}, who lived near the {place}.",
    "{name} was a {nature} {animal} who lived near the {place}.",
)
Plot = tuple[tuple[str, ...], ...]

PLOTS: tuple[Plot, ...] = (
    (  # something lost
        ("One day {name} lost a {colour} {thing}.", "One morning the {colour} {thing} of {name} was gone."),
        ("{He} looked under the bed, but it was not there.", "{He} looked in every corner, but it was not there."),
        ("{name} felt sad and began to cry.", "{name} sat down and was very sad."),
        ("Then {friend} the {other} came by and asked what was wrong.", "{friend} the {other} heard {him} and came to help."),
        ("Together they walked to the {goal}.", "Together they searched the {goal}."),
        ("There, behind a big stone, was the {colour} {thing}!", "And there, under a tree, was the {colour} {thing}!"),
        ("{name} laughed and thanked {friend}.", "{name} thanked {friend} with all {his} heart."),
        ("From that day on they were the best of friends.", "They played with it until the sun went down."),
    ),
    (  # rain
        ("One afternoon dark clouds came over the {place}.", "One afternoon the sky above the {place} turned dark."),
        ("It began to rain, and soon everything was wet.", "The rain fell so hard that nobody could see the path."),
        ("{name} ran to a small house and knocked at the door.", "{name} saw a light in a small house and knocked."),
        ("{friend} the {other} opened and let {him} in.", "{friend} the {other} opened the door with a smile."),
        ("They sat by the fire and ate warm {food}.", "{friend} gave {him} warm {food} and a dry {colour} coat."),
        ("When the rain stopped, a rainbow stood over the {goal}.", "After an hour the sun shone over the {goal}."),
        ("{name} said: the best part of the rain is a good friend.", "{name} said: I hope it will rain again tomorrow."),
    ),
    (  # sharing
        ("One day {name} found a lot of {food} near the {goal}.", "One day {name} carried home a basket of {food}."),
        ("{He} was hungry and wanted to eat it all.", "{He} wanted to keep it all for {himself}."),
        ("But then {he} saw {friend} the {other}, who had nothing.", "On the way {he} met {friend} the {other}, who had no food."),
        ("{name} thought about it for a long time.", "{name} looked at the food, and then at {friend}."),
        ("Then {he} gave half of it to {friend}.", "Then {he} said: let us share."),
        ("They ate together and told each other stories.", "They sat in the grass and ate together."),
        ("The {food} had never tasted so good.", "It was the best meal {name} ever had."),
    ),
    (  # the seed
        ("One spring {name} found a tiny seed.", "One spring {name} put a tiny seed into the ground."),
        ("{friend} the {other} said that nothing would grow from it.", "{friend} the {other} laughed and said it was too small."),
        ("But {name} gave it water every day.", "But {name} cared for it every morning."),
        ("Day after day nothing happened.", "For a long time there was only brown earth."),
        ("Then one morning a green leaf came out.", "Then, one warm morning, there was a green leaf."),
        ("In summer it was a flower, {colour} and tall.", "By summer a {colour} flower stood there, as tall as {name}."),
        ("{friend} said: now I know that small things can grow.", "{friend} said: I was wrong, and I am glad."),
    ),
    (  # stuck in a tree
        ("One windy day {name} played with a {colour} kite.", "On a windy day {name} took a {colour} kite to the {goal}."),
        ("The wind was strong and the kite flew into a tree.", "Suddenly the wind took the kite into a high tree."),
        ("{name} jumped and jumped, but the tree was too high.", "{name} could not reach it."),
        ("{friend} the {other} came and had an idea.", "Then {friend} the {other} came along and looked up."),
        ("{friend} climbed up and pulled it down.", "{name} stood on the back of {friend} and pulled it down."),
        ("Then they let it fly over the {place} together.", "All day long they let it fly over the {place}."),
    ),
    (  # a noise at night
        ("One night {name} heard a strange noise.", "In the middle of the night {name} woke up from a noise."),
        ("{He} took a {thing} and went outside.", "{He} was afraid, but {he} went outside with a {thing}."),
        ("The noise came from the {goal}.", "It was dark, and the noise came nearer and nearer."),
        ("There sat {friend} the {other}, who was singing.", "It was only {friend} the {other}, who could not sleep."),
        ("I am sorry, said {friend}, I did not want to wake you.", "Did I wake you? asked {friend}."),
        ("{name} laughed, and then they sang together.", "{name} sat down, and they looked at the stars."),
        ("In the morning both were very tired and very happy.", "They slept until noon the next day."),
    ),
    (  # learning
        ("{name} wanted to learn how to swim.", "More than anything, {name} wanted to learn how to swim."),
        ("But {he} was afraid of the cold water.", "But the water was deep, and {he} was afraid."),
        ("{friend} the {other} said: I will show you.", "{friend} the {other} promised to help {him}."),
        ("On the first day {name} only put one foot into the water.", "On the first day {he} only stood in the water."),
        ("On the second day {he} tried again and again.", "Every day {he} went a little further."),
        ("At the end of the week {name} swam to the other side.", "After a week {name} could swim like a fish."),
        ("{friend} gave {him} a {colour} {thing} as a prize.", "{friend} was proud and gave {him} a {colour} {thing}."),
    ),
    (  # a birthday
        ("It was the birthday of {friend} the {other}.", "Tomorrow was the birthday of {friend} the {other}."),
        ("{name} had no money to buy a present.", "{name} did not know what to give."),
        ("So {he} went to the {goal} and thought.", "{He} walked to the {goal} to think about it."),
        ("There {he} found an old {thing} and painted it {colour}.", "There lay an old {thing}, and {he} painted it {colour}."),
        ("{friend} opened the present and smiled.", "When {friend} saw it, {friend} could not believe it."),
        ("It is the most beautiful {thing} in the world, said {friend}.", "I will keep this {thing} for ever, said {friend}."),
        ("Then they all ate {food} and danced.", "After that there was {food} for everyone."),
    ),
)  # fmt: skip

REQUESTS = (
    "Tell me a story.",
    "Tell me a story about a {animal}.",
    "Tell me a story about a {nature} {animal}.",
    "Tell me a story about a {animal} called {name}.",
    "Write a story about a {animal}.",
    "Write a short story about {name} the {animal}.",
    "Tell me a story about a {animal} and a {thing}.",
)


def draw(rng: Random) -> Draft:
    """Draw a whole story: two thirds as plain text, the rest as the answer to a request."""
    words, plot = _words(rng), rng.randrange(len(PLOTS))
    sentences = _sentences(rng, plot)
    text, key = " ".join(sentences).format(**words), _key(words, plot)
    if rng.random() < 0.65:
        return Draft(key=key, prompt=BEGIN if rng.random() < 0.5 else "", answer=text + END)
    has_thing = any("{thing}" in sentence for sentence in sentences)
    request = rng.choice(REQUESTS if has_thing else REQUESTS[:-1])
    return Draft(key=key, prompt=render(request.format(**words)), answer=text + END)


def tell(rng: Random) -> str:
    """Write a story for use in another sample's prompt; never a held-out one."""
    while True:
        words, plot = _words(rng), rng.randrange(len(PLOTS))
        if not is_held_out(_key(words, plot)):
            return " ".join(_sentences(rng, plot)).format(**words)


def _key(words: dict[str, str], plot: int) -> tuple[object, ...]:
    return "story", words["name"], words["animal"], words["friend"], plot


def _sentences(rng: Random, plot: int) -> list[str]:
    return [rng.choice(OPENINGS), *(rng.choice(wordings) for wordings in PLOTS[plot])]


def _words(rng: Random) -> dict[str, str]:
    """Draw the words of a story; the hero decides the pronouns."""
    name, friend = rng.sample(NAMES, 2)
    animal, other = rng.sample(ANIMALS, 2)
    place, goal = rng.sample(PLACES, 2)
    is_she = name in SHE
    return {
        "name": name,
        "friend": friend,
        "animal": animal,
        "other": other,
        "place": place,
        "goal": goal,
        "nature": rng.choice(NATURES),
        "colour": rng.choice(COLOURS),
        "thing": rng.choice(THINGS),
        "food": rng.choice(FOODS),
        "he": "she" if is_she else "he",
        "He": "She" if is_she else "He",
        "him": "her" if is_she else "him",
        "his": "her" if is_she else "his",
        "himself": "herself" if is_she else "himself",
    }
