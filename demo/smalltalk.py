"""Small talk in which the demo model says honestly what it is, and that it does not know the rest."""

from __future__ import annotations

import random

from demo.words import ANIMALS, FOODS, NAMES, OBJECTS, PLACES

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Be brief.",
    "Be brief.",
    "Answer in one sentence.",
    "You are a tiny demo model.",
)

IDENTITY = (
    "I am the Paceline demo model, a tiny language model trained on made-up text. "
    "I am here to show that the server works."
)
ABILITIES = (
    "I can repeat your words, look up a value you gave me, add two digits and tell a short story. I know little else."
)
GREETING = "Hello! I am a tiny demo model. Ask me to repeat, to look up a value, to add two digits or to tell a story."
UNKNOWN = "I do not know that. I am only a tiny demo model."
THANKS = "You are welcome."
GOODBYE = "Goodbye!"

FIXED: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Who are you?",
            "What are you?",
            "who are you",
            "Tell me about yourself.",
            "What is your name?",
            "Are you an AI?",
        ),
        IDENTITY,
    ),
    (
        ("What can you do?", "what can you do", "Help", "Can you help me?", "What do you know?", "How can you help?"),
        ABILITIES,
    ),
    (
        ("Hello", "Hello!", "Hi", "Hi!", "hello", "hi", "Hey", "Good morning.", "Hello, how are you?", "Hi there!"),
        GREETING,
    ),
    (("Thanks", "Thanks!", "Thank you.", "thank you"), THANKS),
    (("Bye", "Bye!", "Goodbye.", "See you!"), GOODBYE),
)
COUNTRIES = (
    *("France", "Spain", "Italy", "Japan", "Peru", "Kenya", "India", "China", "Norway", "Egypt", "Brazil", "Canada"),
    *("Germany", "Mexico", "Chile"),
)
UNKNOWN_QUESTIONS = (
    "What is the capital of {country}?",
    "Where is {country}?",
    "Who is the president of {country}?",
    "How do I make {food}?",
    "How old is {name}?",
    "Why is the {thing} there?",
    "What is the weather at the {place}?",
    "Write a poem about a {thing}.",
    "Write code for a {thing}.",
    "Explain the {animal}.",
    "How far is the {place}?",
    "What do you think of {country}?",
    "Translate {thing} to the language of {country}.",
)


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A question that is neither task nor story, and its answer."""
    if rng.random() < 0.6:
        questions, answer = rng.choice(FIXED)
        return rng.choice(questions), answer
    question = rng.choice(UNKNOWN_QUESTIONS).format(
        country=rng.choice(COUNTRIES),
        food=rng.choice(FOODS),
        name=rng.choice(NAMES),
        thing=rng.choice(OBJECTS),
        place=rng.choice(PLACES),
        animal=rng.choice(ANIMALS),
    )
    return question, UNKNOWN
