"""Examples of tool use for the demo model: call a function of the system prompt, and answer from its result.

The model only sees a function's name and the names of its parameters (the chat template writes no more). It only
has to find a word in the prompt and copy it, as in other examples. A hash chooses the held-out (attribute, key) pairs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from demo import words as w

Tool = dict[str, Any]
CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"

# An attribute that a function returns, the word between attribute and key in a question, and names for the parameter.
ATTRIBUTES = (
    ("weather", "in", ("city", "location", "place")),
    ("temperature", "in", ("city", "location", "place")),
    ("time", "in", ("city", "location", "place")),
    ("price", "of", ("item", "name", "product")),
    ("color", "of", ("item", "name", "thing")),
    ("code", "of", ("key", "name", "id")),
    ("number", "of", ("key", "name", "id")),
)
FUNCTION_NAMES = ("get_{}", "get_{}", "get_current_{}", "find_{}", "{}")
SUM_NAMES = ("add", "add", "add_numbers", "sum", "plus")
SUM_PARAMETERS = (("a", "b"), ("a", "b"), ("x", "y"))
QUESTIONS = (
    "What is the {attribute} {word} {key}?",
    "What is the {attribute} {word} {key}?",
    "what is the {attribute} {word} {key}",
    "What's the {attribute} {word} {key}?",
    "Tell me the {attribute} {word} {key}.",
)
WEATHER_QUESTIONS = (
    "What is the weather like in {key}?",
    "What's the weather like in {key}?",
    "How is the weather in {key}?",
)
SUM_QUESTIONS = ("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b} =")
PLURAL_SHARE = 0.15  # questions about two keys, which take two calls


def tool(name: str, parameters: tuple[str, ...], kind: str = "string") -> Tool:
    """A function as clients of OpenAI's API describe it."""
    properties = {parameter: {"type": kind} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it."""
    return CALL_OPENS + json.dumps({"name": name, "arguments": arguments}) + CALL_CLOSES


def key_of(rng: random.Random, attribute: str, word: str) -> str:
    """What a question is about: a city, a thing, a person's name, or a made-up word."""
    if rng.random() < 0.3:
        made_up = w.syllable_word(rng)
        return made_up.capitalize() if word == "in" else made_up
    if word == "in":
        return rng.choice(w.CITIES)
    return rng.choice(w.NAMES) if attribute in ("code", "number") else rng.choice(rng.choice((w.OBJECTS, w.FOODS)))


def _value(rng: random.Random, attribute: str) -> str | int:
    match attribute:
        case "weather":
            return rng.choice(w.WEATHER)
        case "color":
            return rng.choice(w.COLORS)
        case "code":
            return rng.choice((w.syllable_word(rng), w.number(rng, rng.randint(2, 4))))
        case _:
            return rng.choice((int(w.number(rng, rng.randint(1, 3))), w.number(rng, rng.randint(1, 3))))


def _result(rng: random.Random, attribute: str, parameter: str, key: str, value: str | int) -> str:
    """What the function returns: the value alone, or in an object."""
    shape = rng.random()
    if shape < 0.3:
        return str(value)
    if shape < 0.45:
        return json.dumps({"result": value})
    return json.dumps({attribute: value} if shape < 0.8 else {parameter: key, attribute: value})


def _others(rng: random.Random, attribute: str) -> list[Tool]:
    """Up to three functions that the question is not about. One of them may be a sum."""
    found = []
    for other, _, parameters in rng.sample(ATTRIBUTES, rng.choice((0, 0, 1, 2))):
        if other != attribute:
            found.append(tool(rng.choice(FUNCTION_NAMES).format(other), (rng.choice(parameters),)))
    if rng.random() < 0.2:
        found.append(_sum_tool(rng)[0])
    return found


def _sum_tool(rng: random.Random) -> tuple[Tool, str, tuple[str, str]]:
    name, parameters = rng.choice(SUM_NAMES), rng.choice(SUM_PARAMETERS)
    return tool(name, parameters, "integer"), name, parameters


def tool_chat(
    rng: random.Random, draw_pair: Callable[[Callable[[], str]], str]
) -> tuple[list[Tool], list[tuple[str, str]]]:
    """Functions, and a chat as (role, text): a question, the calls, their results, and the answer.

    `draw_pair` draws an (attribute, key) pair of the wanted side of the split."""
    attribute, key = draw_pair(lambda: _pair(rng)).split(" ", 1)
    word, parameters = next((word, names) for name, word, names in ATTRIBUTES if name == attribute)
    name, parameter = rng.choice(FUNCTION_NAMES).format(attribute), rng.choice(parameters)
    keys = [key]
    if rng.random() < PLURAL_SHARE:
        other = draw_pair(lambda: f"{attribute} {key_of(rng, attribute, word)}").split(" ", 1)[1]
        keys += [other] if other != key else []
    asks = rng.choice(WEATHER_QUESTIONS if attribute == "weather" and rng.random() < 0.4 else QUESTIONS)
    question = asks.format(
        attribute=attribute, word=word, key=f" and {word} ".join(keys) if word == "in" else " and ".join(keys)
    )
    chat = [("user", question), ("assistant", "\n".join(call_text(name, {parameter: each}) for each in keys))]
    answers = []
    for each in keys:
        value = _value(rng, attribute)
        chat.append(("tool", _result(rng, attribute, parameter, each, value)))
        answers.append(f"The {attribute} {word} {each} is {value}.")
    chat.append(("assistant", " ".join(answers)))
    tools = [tool(name, (parameter,)), *_others(rng, attribute)]
    rng.shuffle(tools)
    return tools, chat


def sum_chat(rng: random.Random) -> tuple[list[Tool], list[tuple[str, str]]]:
    """The same for a sum."""
    a, b = rng.randrange(10), rng.randrange(10)
    added, name, (first, second) = _sum_tool(rng)
    result = rng.choice((str(a + b), json.dumps({"result": a + b}), json.dumps({"sum": a + b})))
    tools = [added, *_others(rng, "")]
    tools = [one for one in tools if one is added or one["function"]["name"] not in SUM_NAMES]
    rng.shuffle(tools)
    return tools, [
        ("user", rng.choice(SUM_QUESTIONS).format(a=a, b=b)),
        ("assistant", call_text(name, {first: a, second: b})),
        ("tool", result),
        ("assistant", f"{a} + {b} = {a + b}."),
    ]


def question_without_tools(rng: random.Random) -> str:
    """A question that a function could answer."""
    _, chat = tool_chat(rng, lambda make: make())
    return chat[0][1]


def unused_tools(rng: random.Random) -> list[Tool]:
    """Functions for a question that needs none of them."""
    attribute, _, parameters = rng.choice(ATTRIBUTES)
    return [tool(rng.choice(FUNCTION_NAMES).format(attribute), (rng.choice(parameters),))]


def _pair(rng: random.Random) -> str:
    attribute, word, _ = rng.choice(ATTRIBUTES)
    return f"{attribute} {key_of(rng, attribute, word)}"
