"""`echo` of completions: the answer begins with the prompt. The prompt has log probabilities if the output has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from demo import CHECKPOINT
from services.gateway.openai.jobs import MAX_ECHO_CHARS
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, Running, Start
from tests.contract.gateway.fake_scheduler import scripted
from tests.support.sse import parse_events, told

COMPLETIONS = "/v1/completions"
TOKENIZER = TextTokenizer.from_folder(CHECKPOINT)
IDS = TOKENIZER.encode("one two three", add_special_tokens=False)
FOX = TOKENIZER.encode("a fox", add_special_tokens=False)


async def completion(running: Running, **body: Any) -> dict[str, Any]:
    defaults = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    answer = await running.http.post(COMPLETIONS, json=defaults | body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_an_echo_puts_the_prompt_before_the_output(running: Running) -> None:
    [plain] = (await completion(running, prompt="Once there was"))["choices"]
    [echoed] = (await completion(running, prompt="Once there was", echo=True))["choices"]
    assert echoed == plain | {"text": "Once there was" + plain["text"]}
    [of_ids] = (await completion(running, prompt=IDS, echo=True))["choices"]
    assert of_ids["text"].startswith("one two three")
    several = await completion(running, prompt=["a fox", "one"], n=2, echo=True)
    beginnings = ["a fox", "a fox", "one", "one"]
    assert all(c["text"].startswith(b) for c, b in zip(several["choices"], beginnings, strict=True))


@pytest.mark.parametrize("skip", [False, True])
async def test_special_tokens_of_a_prompt_are_shown(running: Running, skip: bool) -> None:
    """As vLLM does. `skip_special_tokens` is about the output."""
    ids = TOKENIZER.encode("<|user|>hi", add_special_tokens=False)
    options = {"echo": True, "max_tokens": 0, "skip_special_tokens": skip, "logprobs": 0}
    [choice] = (await completion(running, prompt=ids, **options))["choices"]
    assert choice["text"] == "<|user|>hi"
    assert choice["logprobs"]["tokens"][0] == "<|user|>"
    assert choice["logprobs"]["text_offset"][:2] == [0, len("<|user|>")]


async def test_text_offsets_in_a_text_prompt(running: Running) -> None:
    """Text offsets count the special tokens that the prompt spells, but not the tokenizer's BOS token."""
    text = "<|user|>Öl two<|end|>"
    [choice] = (await completion(running, prompt=text, echo=True, max_tokens=1, logprobs=0))["choices"]
    scores = choice["logprobs"]
    assert (scores["tokens"][:2], scores["text_offset"][:3]) == (["<|bos|>", "<|user|>"], [0, 0, len("<|user|>")])
    ends = scores["tokens"].index("<|end|>")
    assert scores["text_offset"][ends:] == [len(text) - len("<|end|>"), len(text)]


async def test_text_offsets_in_a_prompt_of_token_ids(running: Running) -> None:
    """A special token in the midst of a character, and before its own name as plain text."""
    [special] = TOKENIZER.encode("<|user|>", add_special_tokens=False)
    first, *rest = TOKENIZER.encode("€", add_special_tokens=False)
    options = {"echo": True, "max_tokens": 0, "logprobs": 0}
    assert rest, "it is several tokens"
    ids = [first, special, *rest, *TOKENIZER.encode("hello", add_special_tokens=False)]
    [choice] = (await completion(running, prompt=ids, **options))["choices"]
    assert choice["text"] == TOKENIZER.decode(ids)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:3] == [0, 1, 1 + len("<|user|>")]
    assert offsets == sorted(offsets)
    name = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "<|user|>"]
    [choice] = (await completion(running, prompt=[special, *name], **options))["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<|user|>" * 2, [0, *range(8, 16)])


async def test_an_echoed_prompt_has_log_probabilities_if_its_output_has_them(start: Start) -> None:
    running = await start(next_token=scripted(IDS))
    options: dict[str, Any] = {"prompt": IDS, "max_tokens": len(IDS), "seed": 2, "temperature": 1.0, "logprobs": 2}
    [plain] = (await completion(running, **options))["choices"]
    [echoed] = (await completion(running, **options, echo=True))["choices"]
    mine, output = echoed["logprobs"], plain["logprobs"]
    count = len(IDS)
    assert echoed["text"] == "one two threeone two three"
    assert mine["tokens"] == output["tokens"] * 2
    assert mine["token_logprobs"] == [None, *(-i / 8 for i in range(1, count)), *output["token_logprobs"]]
    assert mine["top_logprobs"][0] is None
    assert mine["top_logprobs"][count:] == output["top_logprobs"]
    for i in range(1, count):
        assert mine["tokens"][i] in mine["top_logprobs"][i]
        assert len(mine["top_logprobs"][i]) in (2, 3)
    offsets = output["text_offset"]
    assert mine["text_offset"] == offsets + [len("one two three") + offset for offset in offsets]
    assert echoed["prompt_logprobs"] is None
    # Each sample shows the prompt log probabilities of the first sample.
    both = (await completion(running, **options, echo=True, n=2))["choices"]
    assert [choice["logprobs"]["token_logprobs"][:count] for choice in both] == [mine["token_logprobs"][:count]] * 2
    assert [s.sampling.prompt_logprobs for s in running.scheduler.submissions[-2:]] == [True, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_max_tokens_0_gives_the_prompt_alone(running: Running, stream: bool) -> None:
    """Harnesses that compare answers ask for no token at all."""
    options: dict[str, Any] = {"prompt": [FOX, IDS], "max_tokens": 0, "echo": True, "logprobs": 1}
    if not stream:
        body = await completion(running, **options)
        texts = [choice["text"] for choice in body["choices"]]
        reasons = [choice["finish_reason"] for choice in body["choices"]]
        counts = [len(choice["logprobs"]["tokens"]) for choice in body["choices"]]
        usage = body["usage"]
    else:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await running.http.post(COMPLETIONS, json=options)
        known = told(parse_events(answer.text.splitlines()))
        texts = [known.texts[i] for i in range(2)]
        reasons = [reason for i in range(2) for reason in known.reasons[i]]
        counts = [len(known.logprobs[i]) for i in range(2)]
        usage = known.rest[0]
    assert texts == ["a fox", "one two three"]
    assert reasons == ["length"] * 2
    assert counts == [len(FOX), len(IDS)]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, sum(counts))


async def test_a_stream_begins_with_the_prompt(running: Running) -> None:
    options = {"prompt": "a fox", "echo": True, "logprobs": 1, "n": 3, "seed": 4, "temperature": 1.0}
    whole = await completion(running, **options)
    shown = {"include_usage": True, "continuous_usage_stats": True, "include_event_ids": True}
    stream = {"stream": True, "stream_options": shown}
    answer = await running.http.post(COMPLETIONS, json={"max_tokens": 4} | stream | options)
    events = list(parse_events(answer.text.splitlines()))
    known = told(events)
    assert json.loads(events[0].data)["choices"][0]["text"] == "a fox"
    assert json.loads(events[0].data)["usage"]["completion_tokens"] == 0
    for i, choice in enumerate(whole["choices"]):
        assert known.texts[i] == choice["text"]
        assert len(known.logprobs[i]) == len(choice["logprobs"]["tokens"])
    assert all(event.id for event in events)


async def test_an_echo_without_output_can_be_resumed_without_a_seed(running: Running) -> None:
    body = {"prompt": "a fox", "max_tokens": 0, "echo": True, "stream": True, "temperature": 1.0}
    body["stream_options"] = {"include_event_ids": True}
    first, *rest = parse_events((await running.http.post(COMPLETIONS, json=body)).text.splitlines())
    headers = {"Last-Event-ID": first.id}
    again = (await running.http.post(COMPLETIONS, json=body, headers=headers)).text.splitlines()
    assert [event.id for event in parse_events(again)] == [event.id for event in rest]
    headers = {"Last-Event-ID": rest[0].id.replace(".0e", ".1e")}
    refused = await running.http.post(COMPLETIONS, json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_echo_fields_that_are_wrong_or_above_a_limit_are_refused(running: Running) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": [7] * 1500, "echo": True, "logprobs": 20, "n": 3}, "echo"),
        ({"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({"prompt": "a", "echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ]
    for body, param in cases:
        answer = await running.http.post(COMPLETIONS, json={"model": MODEL} | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body


async def test_the_echoes_of_all_choices_together_have_a_limit(running: Running) -> None:
    text = " fox" * 1000
    count = MAX_ECHO_CHARS // len(text) // 64 + 1
    body = {"model": MODEL, "prompt": [text] * count, "n": 64, "echo": True, "max_tokens": 1}
    answer = await running.http.post(COMPLETIONS, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")
    assert str(MAX_ECHO_CHARS) in answer.json()["error"]["message"]
