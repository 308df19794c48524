"""A small grammar of short stories. It gives the demo model fluent sentences, and the look-up task its filler text."""

from __future__ import annotations

import random
from dataclasses import dataclass

from demo.words import ADJECTIVES, ANIMALS, COLORS, FOODS, NAMES, OBJECTS, PLACES

OPENINGS = (
    "Once there was a {adj} {animal} named {name}.",
    "{name} was a {adj} {animal}.",
    "There once lived a {adj} {animal} called {name}.",
    "A {adj} {animal} named {name} lived near the {place}.",
)
MIDDLES = (
    "{name} lived near the {place}.",
    "Every morning {name} walked to the {place}.",
    "One day {name} found a {color} {object} by the {place2}.",
    "{name} liked to eat {food}.",
    "{friend} the {animal2} came to visit.",
    "{name} and {friend} played with the {object}.",
    "{name} gave the {color} {object} to {friend}.",
    "It was raining, so they hid under a {object2}.",
    "They looked for the {object2} all day.",
    "{friend} was very {adj2}.",
    "The sun was warm and the {place} was quiet.",
    "{name} asked {friend} for help.",
    "Then they ate {food} together.",
    "At night {name} looked at the stars.",
)
ENDINGS = (
    "At the end of the day {name} was happy.",
    "{name} and {friend} were friends from then on.",
    "Then {name} went home and slept well.",
    "And that is how {name} found the {object}.",
)


@dataclass(frozen=True)
class Story:
    """A story as sentences, with the name and the kind of its hero, which a prompt may name."""

    name: str
    animal: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def story(rng: random.Random, middles: int, name: str | None = None, animal: str | None = None) -> Story:
    """One story with `middles` sentences between its opening and its ending; the middles keep a sensible order."""
    hero, friend = rng.sample(NAMES, 2)
    first_place, second_place = rng.sample(PLACES, 2)
    first_object, second_object = rng.sample(OBJECTS, 2)
    slots = {
        "name": name or hero,
        "friend": friend,
        "animal": animal or rng.choice(ANIMALS),
        "animal2": rng.choice(ANIMALS),
        "adj": rng.choice(ADJECTIVES),
        "adj2": rng.choice(ADJECTIVES),
        "place": first_place,
        "place2": second_place,
        "object": first_object,
        "object2": second_object,
        "color": rng.choice(COLORS),
        "food": rng.choice(FOODS),
    }
    chosen = sorted(rng.sample(range(len(MIDDLES)), min(middles, len(MIDDLES))))
    templates = [rng.choice(OPENINGS), *(MIDDLES[i] for i in chosen), rng.choice(ENDINGS)]
    return Story(slots["name"], slots["animal"], tuple(template.format(**slots) for template in templates))


def filler(rng: random.Random, words: int) -> str:
    """Story sentences with about `words` words in all: text to put between a fact and the question about it."""
    sentences: list[str] = []
    count = 0
    while count < words:
        for sentence in story(rng, rng.randint(2, 5)).sentences:
            if count >= words:
                break
            sentences.append(sentence)
            count += len(sentence.split())
    return " ".join(sentences)
