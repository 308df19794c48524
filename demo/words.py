"""Word lists and random words for the demo corpus. They fill the templates of the corpus."""

from __future__ import annotations

import random


def _listed(text: str) -> list[str]:
    return text.split()


NAMES = _listed(
    "Ada Ben Cleo Dora Eli Finn Gus Hana Ivan Jade Kai Lena Mira Nora Omar Pia Quinn Rosa Sam Tara Uma Vera Will Yara "
    "Zoe"
)
ANIMALS = _listed(
    "fox cat dog owl bear frog duck mouse horse goat crow wolf hare seal bee ant crab swan fish lion sheep snail"
)
OBJECTS = _listed(
    "apple ball bell boat book bowl box bread brush bus cake candle car chair clock cloud coat coin cup door drum egg "
    "flag flower fork gate glass glove hammer hat house jar key kite ladder lamp leaf letter map mirror moon nail "
    "nest paper pen pencil piano plate pot ring road rock rope salt shell shoe spoon star stone sun table tent ticket "
    "train tree truck wagon watch wheel window"
)
COLORS = _listed("red blue green yellow black white pink brown gray orange purple gold silver")
ADJECTIVES = _listed("small big old young quiet happy brave kind clever lazy tall quick gentle proud shy sleepy")
PLACES = _listed("river forest hill lake garden farm bridge tower village beach field cave market mill harbor meadow")
FOODS = _listed("bread soup cake honey cheese apples nuts berries rice corn pie milk")

CITIES = [
    *_listed(
        "Paris London Berlin Rome Madrid Oslo Tokyo Vienna Prague Lisbon Dublin Athens Warsaw Helsinki Stockholm "
        "Copenhagen Amsterdam Brussels Zurich Geneva Munich Hamburg Milan Naples Venice Barcelona Seville Porto "
        "Budapest Moscow Cairo Nairobi Lagos Delhi Mumbai Beijing Shanghai Seoul Bangkok Singapore Sydney "
        "Melbourne Toronto Montreal Boston Chicago Seattle Denver Dallas Houston Miami Lima Bogota Santiago"
    ),
    *("New York", "San Francisco", "Los Angeles", "Hong Kong", "Mexico City"),
]
WEATHER = _listed("sunny rainy cloudy windy snowy foggy stormy clear warm cold hot mild")

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def syllable_word(rng: random.Random) -> str:
    """A made-up word such as `mirako`: nothing to memorise, so the model has to read it from the prompt."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3))))


def number(rng: random.Random, digits: int) -> str:
    """A number of exactly `digits` digits, without a leading zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def gibberish(rng: random.Random) -> str:
    """A few random letters, in upper or lower case. With them the model trains on every ASCII letter and learns to copy
    odd input."""
    word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 4)))
    return rng.choice((word, word.upper(), word.capitalize()))


def plain_word(rng: random.Random) -> str:
    """A real word from the lists above."""
    return rng.choice(rng.choice((OBJECTS, OBJECTS, OBJECTS, ANIMALS, COLORS, ADJECTIVES, PLACES, FOODS, NAMES)))
