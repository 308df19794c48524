"""Seeded examples for the demo model: repeat, look-up, addition, tools, stories and a little honest small talk.

Five tasks are scored. They reveal a damaged KV cache, because the answer can only be found by attending to exact
tokens earlier in the prompt. Training and held-out examples of a task never share an instance:

* repeat: a hash of the text to repeat decides on which side it falls;
* lookup: a hash of each (key, value) pair decides;
* add: there are only 100 sums of two digits, so a hash of the whole question decides;
* tool and result (call a function, answer from what it returned): a hash of (attribute, key) decides.

Two kinds of training examples ignore this split: sums that a function computes, and questions that need a function in
a prompt without functions. So they may contain a held-out question or pair.

This module needs neither torch nor a tokenizer, so that any test can take held-out prompts from it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from demo import words as w
from demo.smalltalk import SYSTEM_PROMPTS, UNKNOWN, small_talk
from demo.stories import filler, story
from demo.tools import Tool, question_without_tools, sum_chat, tool_chat, unused_tools

Message = dict[str, str]
TASKS = ("repeat", "lookup", "add", "tool", "result")
HELD_OUT_SHARE = 8  # one instance in this many is held out


@dataclass(frozen=True)
class Example:
    """A prompt and its answer: the only right one in the tasks of `TASKS`. `messages` ends with the turn of the user or
    a tool; it is empty for plain text. If the assistant calls functions, the calls are in the content of its message,
    as the model writes them."""

    task: str
    messages: tuple[Message, ...]
    answer: str
    distance_words: int = 0  # lookup only: about how many filler words lie between the fact and the question
    graded_turns: bool = False  # training only: earlier assistant turns are answers to learn from as well
    tools: tuple[Tool, ...] = ()


def is_held_out(task: str, instance: str) -> bool:
    """Which side of the split an instance is on: a pure function of its text, the same for every seed."""
    digest = hashlib.sha256(f"{task}\0{instance}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _draw(make: Callable[[], str], task: str, held: bool) -> str:
    """Draw until the instance is on the wanted side of the split."""
    while True:
        instance = make()
        if is_held_out(task, instance) == held:
            return instance


# --- repeat ---------------------------------------------------------------------------------------------------------

REPEAT_PHRASINGS = (
    'Repeat after me: "{}"',
    "Repeat after me:\n{}",
    "Repeat after me: {}",
    "Please repeat: {}",
    'Say "{}"',
    "Copy this text:\n{}",
)


def _repeat_text(rng: random.Random, level: float) -> str:
    kind = rng.choice(
        ("words", "words", "syllables", "syllables", "mixed", "numbers", "letters", "gibberish", "sentence")
    )
    count = rng.randint(1, 3 + round(9 * level))
    if kind == "words":
        return " ".join(w.plain_word(rng) for _ in range(count))
    if kind == "syllables":
        return " ".join(w.syllable_word(rng) for _ in range(count))
    if kind == "mixed":
        makers = (w.plain_word, w.syllable_word, lambda r: w.number(r, r.randint(1, 3)))
        return " ".join(rng.choice(makers)(rng) for _ in range(count))
    if kind == "numbers":
        return " ".join(w.number(rng, rng.randint(1, 4)) for _ in range(min(count, 4)))
    if kind == "letters":
        return " ".join(rng.sample(w.LETTERS, count))
    if kind == "gibberish":
        return " ".join(w.gibberish(rng) for _ in range(min(count, 5)))
    return rng.choice(story(rng, 3).sentences)


def repeat(rng: random.Random, level: float = 1.0, held: bool = False) -> Example:
    text = _draw(lambda: _repeat_text(rng, level), "repeat", held)
    return Example("repeat", (user(rng.choice(REPEAT_PHRASINGS).format(text)),), text)


# --- lookup ---------------------------------------------------------------------------------------------------------

ATTRIBUTES = ("code", "number", "word", "secret", "value", "mark")
ACKNOWLEDGEMENTS = ("Okay.", "Noted.", "I will remember that.")
MAX_FILLER_WORDS = 150  # about 200 tokens


def _key(rng: random.Random) -> str:
    return rng.choice((w.syllable_word(rng), w.syllable_word(rng), rng.choice(w.NAMES)))


def _value(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return w.number(rng, rng.randint(1, 4))
    return w.syllable_word(rng) if kind < 0.75 else w.plain_word(rng)


def _facts(rng: random.Random, count: int, held: bool) -> list[tuple[str, str]]:
    """(key, value) pairs with different keys. Only the first pair, which is asked for, may be held out."""
    facts: dict[str, str] = {}
    while len(facts) < count:
        key, value = _draw(lambda: f"{_key(rng)} {_value(rng)}", "lookup", held and not facts).split(" ")
        facts.setdefault(key, value)
    return list(facts.items())


def _wording(rng: random.Random) -> tuple[str, str, str]:
    """Templates of a fact and of its question, and the separator of sentences: as a table or in plain English."""
    if rng.random() < 0.25:
        return "{} = {}", "{} = ?", "\n"
    attribute = rng.choice(ATTRIBUTES)
    return f"The {attribute} of {{}} is {{}}.", f"What is the {attribute} of {{}}?", " "


def lookup(rng: random.Random, level: float = 1.0, held: bool = False) -> Example:
    """A fact, perhaps among others, then other text (up to ~200 tokens at level 1), then a question about the fact."""
    facts = _facts(rng, rng.randint(1, 2 + round(4 * level)), held)
    (key, value), others = facts[0], facts[1:]
    distance = rng.randint(0, round(MAX_FILLER_WORDS * level)) if rng.random() < 0.8 else 0
    fact, question, ask = _wording(rng)
    lines = [fact.format(*pair) for pair in others]
    lines.insert(rng.randint(0, len(lines)), fact.format(key, value))
    given, between, question = ask.join(lines), filler(rng, distance), question.format(key)
    answer = fact.format(key, value)
    shape = rng.random()
    messages: tuple[Message, ...]
    if shape < 0.7:
        messages = (user(ask.join(part for part in (given, between, question) if part)),)
    elif shape < 0.85 and between:
        turns = (user(given), assistant(rng.choice(ACKNOWLEDGEMENTS)), user("Tell me a story."), assistant(between))
        messages = (*turns, user(question))
    else:
        given = ask.join(part for part in (given, between) if part)
        messages = (user(given), assistant(rng.choice(ACKNOWLEDGEMENTS)), user(question))
    return Example("lookup", messages, answer, distance)


# --- add ------------------------------------------------------------------------------------------------------------

ADD_PHRASINGS = (
    "What is {a} + {b}?",
    "{a} + {b} =",
    "{a} + {b}",
    "{a}+{b}",
    "Add {a} and {b}.",
    "How much is {a} plus {b}?",
    "What is {a} plus {b}?",
    "Please compute {a} + {b}.",
    "{name} has {a} {thing}s and finds {b} more. How many {thing}s is that?",
)
ADD_PREFIXES = ("", "", "Hello! ", "Hi. ", "Please help me. ", "Here is a sum. ", "Quick question: ", "{name} asks: ")


def add(rng: random.Random, level: float = 1.0, held: bool = False) -> Example:
    a, b = rng.randrange(10), rng.randrange(10)

    def make() -> str:
        template = rng.choice(ADD_PREFIXES) + rng.choice(ADD_PHRASINGS)
        thing = rng.choice(("apple", "coin", "shell", "stone", "egg", "star"))
        return template.format(a=a, b=b, name=rng.choice(w.NAMES), thing=thing)

    return Example("add", (user(_draw(make, "add", held)),), f"{a} + {b} = {a + b}.")


# --- the rest: fluent text and small talk ---------------------------------------------------------------------------


def plain_story(rng: random.Random, level: float = 1.0) -> Example:
    return Example("story", (), story(rng, rng.randint(2, 3 + round(5 * level))).text)


def told_story(rng: random.Random, level: float = 1.0) -> Example:
    tale = story(rng, rng.randint(2, 3 + round(4 * level)))
    if rng.random() < 0.3:
        cut = rng.randint(1, len(tale.sentences) - 1)
        prompt = "Continue the story: " + " ".join(tale.sentences[:cut])
        return Example("continue", (user(prompt),), " ".join(tale.sentences[cut:]))
    about = rng.choice(
        (f" about {tale.name}", f" about a {tale.animal}", f" about a {tale.animal} named {tale.name}", "")
    )
    verb = rng.choice(("Tell me a story", "Write a story", "Tell me a short story", "Please tell me a story"))
    return Example("tell", (user(f"{verb}{about}."),), tale.text)


def talk(rng: random.Random, level: float = 1.0) -> Example:
    question, answer = small_talk(rng)
    return Example("talk", (user(question),), answer)


# --- tools ----------------------------------------------------------------------------------------------------------

TOOL_SHARE = 0.5  # of the training examples of the second stage
SUM_SHARE = 0.15  # of the training examples with a call
UNUSED_SHARE = 0.2  # of the examples of TOOL_SHARE: questions that need no tool, in prompts with tools
MISSING_SHARE = 0.1  # of the examples of TOOL_SHARE: questions that need a tool, in prompts without tools


def _tool_chat(rng: random.Random, held: bool) -> tuple[tuple[Tool, ...], tuple[Message, ...], str]:
    """Functions, a chat with one or two calls and their results, and the answer."""
    if not held and rng.random() < SUM_SHARE:
        tools, chat = sum_chat(rng)
    else:
        tools, chat = tool_chat(rng, lambda make: _draw(make, "tool", held))
    turns = tuple({"role": role, "content": content} for role, content in chat)
    return tuple(tools), turns[:-1], turns[-1]["content"]


def tool(rng: random.Random, level: float = 1.0, held: bool = False) -> Example:
    """A question that a function of the prompt answers: the answer is the call, or two calls."""
    tools, messages, _ = _tool_chat(rng, held)
    return Example("tool", messages[:1], messages[1]["content"], tools=tools)


def result(rng: random.Random, level: float = 1.0, held: bool = False) -> Example:
    """The answer from what a function has returned."""
    tools, messages, answer = _tool_chat(rng, held)
    return Example("result", messages, answer, graded_turns=not held, tools=tools)


def unused(rng: random.Random, level: float = 1.0) -> Example:
    """A question that no function of the prompt answers."""
    example = rng.choice((talk, add, repeat))(rng, level)
    return replace(example, tools=tuple(unused_tools(rng)))


def missing(rng: random.Random, level: float = 1.0) -> Example:
    """A question that needs a function, in a prompt without functions."""
    return Example("talk", (user(question_without_tools(rng)),), UNKNOWN)


TASK_MAKERS: dict[str, Callable[..., Example]] = {
    "repeat": repeat,
    "lookup": lookup,
    "add": add,
    "tool": tool,
    "result": result,
}
MIX: tuple[tuple[Callable[..., Example], float], ...] = (
    (repeat, 0.32),
    (lookup, 0.40),
    (add, 0.10),
    (plain_story, 0.06),
    (told_story, 0.07),
    (talk, 0.05),
)


CONVERSATION_SHARE = 0.35


def _in_context(rng: random.Random, example: Example) -> Example:
    """Sometimes put a system prompt, or an earlier unrelated exchange, before the example."""
    messages = example.messages
    if not example.tools and rng.random() < 0.15:
        before = rng.choice((talk, add))(rng)
        messages = (*before.messages, assistant(before.answer), *messages)
    if rng.random() < 0.2:
        messages = ({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *messages)
    return replace(example, messages=messages)


def conversation(rng: random.Random, level: float = 1.0) -> Example:
    """Several short tasks in a row, every answer graded: far more to learn per token than one question alone."""
    turns: list[Message] = []
    kinds = rng.choice((("lookup",), ("lookup",), ("repeat",), ("add",), ("lookup", "repeat", "add")))
    facts = _facts(rng, rng.randint(2, 3 + round(5 * level)), held=False)
    fact, question, between = _wording(rng)
    if "lookup" in kinds:
        turns += [user(between.join(fact.format(*pair) for pair in facts)), assistant(rng.choice(ACKNOWLEDGEMENTS))]
    for _ in range(rng.randint(2, 3 + round(5 * level))):
        kind = rng.choice(kinds)
        if kind == "lookup":
            key, value = rng.choice(facts)
            turns += [user(question.format(key)), assistant(fact.format(key, value))]
        else:
            example = TASK_MAKERS[kind](rng, level)
            turns += [*example.messages, assistant(example.answer)]
    return Example("conversation", tuple(turns[:-1]), turns[-1]["content"], graded_turns=True)


def single_example(rng: random.Random, level: float = 1.0) -> Example:
    """One example of `MIX`. A higher `level` (0 or more) makes longer texts and more facts."""
    make = rng.choices([maker for maker, _ in MIX], [weight for _, weight in MIX])[0]
    example = make(rng, level)
    return _in_context(rng, example) if example.messages else example


def training_example(rng: random.Random, level: float = 1.0, tools: bool = False) -> Example:
    """What the model trains on: single examples and conversations. With `tools` (the second stage), TOOL_SHARE of the
    examples are about tools."""
    if tools and rng.random() < TOOL_SHARE:
        kind = rng.random()
        make = unused if kind < UNUSED_SHARE else missing if kind < UNUSED_SHARE + MISSING_SHARE else result
        return _in_context(rng, make(rng, level))
    return conversation(rng, level) if rng.random() < CONVERSATION_SHARE else single_example(rng, level)


def held_out(task: str, n: int, seed: int = 0) -> list[Example]:
    """`n` prompts of a task in `TASKS`, with the exact answer, that no training run can have seen."""
    rng = random.Random(f"held-out {task} {seed}")
    return [_in_context(rng, TASK_MAKERS[task](rng, 1.0, held=True)) for _ in range(n)]
