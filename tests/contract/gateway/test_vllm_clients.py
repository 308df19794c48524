"""What clients of vLLM send and read beside OpenAI's fields, through a gateway over loopback."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import APIStatusError

from demo import CHECKPOINT
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, Running, Start, until
from tests.contract.gateway.fake_scheduler import scripted
from tests.support.sse import parse_events

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TOKENIZER = TextTokenizer.from_folder(CHECKPOINT)
IDS = TOKENIZER.encode("one two three four", add_special_tokens=False)
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
PREFILLED = [*CHAT, {"role": "assistant", "content": "The fox"}]
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


async def post(running: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = await running.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def refused(running: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = await running.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


async def chunks(running: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = await running.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(event.data) for event in parse_events(answer.text.splitlines()) if event.data != "[DONE]"]


# -- answers


async def test_a_whole_answer_has_vllms_keys(running: Running) -> None:
    [choice] = (await post(running, COMPLETIONS, prompt=[7, 8], max_tokens=2))["choices"]
    names = ("stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids")
    assert [choice[name] for name in names] == [None] * 4
    chat = await post(running, CHATS, messages=CHAT, max_tokens=2)
    assert (chat["prompt_logprobs"], chat["prompt_token_ids"]) == (None, None)
    assert (chat["choices"][0]["stop_reason"], chat["choices"][0]["token_ids"]) == (None, None)


async def test_return_token_ids_adds_the_ids_of_prompt_and_output(start: Start) -> None:
    running = await start(next_token=scripted(IDS), step_s=0.001)
    options: dict[str, Any] = {"max_tokens": len(IDS), "return_token_ids": True, "n": 2}
    whole = await post(running, COMPLETIONS, prompt=[7, 8], **options)
    assert [(c["prompt_token_ids"], c["token_ids"]) for c in whole["choices"]] == [([7, 8], IDS)] * 2
    streamed: list[list[int]] = [[], []]
    prompts: list[Any] = []
    for chunk in await chunks(running, COMPLETIONS, prompt=[7, 8], **options):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
            prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert (streamed, prompts) == ([IDS, IDS], [[7, 8]] * 2)
    chat = await post(running, CHATS, messages=CHAT, max_tokens=len(IDS), return_token_ids=True)
    expected = TOKENIZER.encode_chat(CHAT)
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (expected, IDS)
    first, *rest = await chunks(running, CHATS, messages=CHAT, max_tokens=len(IDS), return_token_ids=True)
    assert first["prompt_token_ids"] == expected
    assert [token for chunk in rest for token in chunk["choices"][0]["token_ids"]] == IDS


async def test_tokens_named_by_their_ids(start: Start) -> None:
    running = await start(next_token=scripted(IDS))
    options: dict[str, Any] = {"max_tokens": 2, "return_tokens_as_token_ids": True}
    [choice] = (await post(running, COMPLETIONS, prompt=[7, 8], logprobs=1, echo=True, **options))["choices"]
    names = [f"token_id:{token}" for token in [7, 8, *IDS[:2]]]
    assert choice["logprobs"]["tokens"] == names
    assert names[2] in choice["logprobs"]["top_logprobs"][2]
    [choice] = (await post(running, CHATS, messages=CHAT, logprobs=True, top_logprobs=1, **options))["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names[2:]
    assert bytes(choice["logprobs"]["content"][0]["bytes"]).decode() == TOKENIZER.decode(IDS[:1])


@pytest.mark.parametrize(
    ("options", "finish_reason", "stop_reason"),
    [
        ({"stop": ["zzz", "two"]}, "stop", "two"),
        ({"stop_token_ids": [IDS[1]]}, "stop", IDS[1]),
        ({"max_tokens": 2}, "length", None),
        ({}, "stop", None),
    ],
)
async def test_finish_reason_and_stop_reason_say_why_an_answer_ended(
    start: Start, options: dict[str, Any], finish_reason: str, stop_reason: Any
) -> None:
    running = await start(next_token=scripted([*IDS, 5]))  # 5: end of sequence
    for path, prompt in ((COMPLETIONS, {"prompt": [7]}), (CHATS, {"messages": CHAT})):
        body = {"max_tokens": 50, **options, **prompt}
        whole = (await post(running, path, **body))["choices"][0]
        last = (await chunks(running, path, **body))[-1]["choices"][0]
        for choice in (whole, last):
            assert (choice["finish_reason"], choice["stop_reason"]) == (finish_reason, stop_reason)


async def test_a_stream_interval_sends_fewer_events_with_the_same_text(start: Start) -> None:
    running = await start(next_token=scripted(IDS), step_s=0.005)
    body: dict[str, Any] = {"prompt": [7], "max_tokens": 41, "return_token_ids": True}
    found = await chunks(running, COMPLETIONS, stream_interval=10, **body)
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in found]
    assert sum(sizes) == 41
    assert len(sizes) <= 7
    text = "".join(chunk["choices"][0]["text"] for chunk in found)
    assert text == (await post(running, COMPLETIONS, **body))["choices"][0]["text"]


async def test_an_answer_has_the_id_of_its_request(running: Running) -> None:
    for path, prefix, of_kind in ((COMPLETIONS, "cmpl-", {"prompt": "x"}), (CHATS, "chatcmpl-", {"messages": CHAT})):
        body = {**of_kind, "max_tokens": 1}

        async def answer_id(headers: dict[str, str], given: dict[str, Any] = body, path: str = path) -> str:
            answer = await running.http.post(path, json=given, headers=headers)
            return str(answer.json()["id"])

        assert await answer_id({"X-Request-Id": "mine"}) == prefix + "mine"
        assert await answer_id({}, body | {"request_id": "of the body"}) == prefix + "ofthebody"
        assert await answer_id({"X-Request-Id": "mine"}, body | {"request_id": "other"}) == prefix + "mine"
        assert len(await answer_id({})) == len(prefix) + 32


# -- prompts


async def test_a_prompt_that_is_too_long_may_be_cut(running: Running) -> None:
    async def tokens(path: str = COMPLETIONS, **body: Any) -> list[int]:
        answer = await post(running, path, max_tokens=1, return_token_ids=True, **body)
        choice = answer["choices"][0] if path == COMPLETIONS else answer
        return list(choice["prompt_token_ids"])

    long = [7 + i % 900 for i in range(5000)]
    assert await tokens(prompt=long, truncate_prompt_tokens=3) == long[-3:]
    assert await tokens(prompt=long, truncate_prompt_tokens=3, truncation_side="right") == long[:3]
    assert await tokens(prompt=long, truncate_prompt_tokens=-1) == long[-2047:]
    text = " fox" * 30_000
    bos, *rest = await tokens(prompt=text, truncate_prompt_tokens=5)
    assert [bos, *rest] == [TOKENIZER.encode("x")[0], *TOKENIZER.encode(text)[-4:]]
    chat = [{"role": "user", "content": text}]
    ids = TOKENIZER.encode_chat(chat)
    assert await tokens(CHATS, messages=chat, truncate_prompt_tokens=9) == ids[-9:]
    echoed = await post(running, COMPLETIONS, prompt="one two three", truncate_prompt_tokens=2, echo=True, max_tokens=0)
    assert echoed["choices"][0]["text"] == TOKENIZER.decode(TOKENIZER.encode_part("one two three", 2))
    for wrong in (0, -2, 2049):
        error = await refused(running, COMPLETIONS, prompt=[7], truncate_prompt_tokens=wrong)
        assert error["param"] == "truncate_prompt_tokens"
    error = await refused(running, COMPLETIONS, prompt=[7], truncation_side="left")
    assert error["param"] == "truncation_side"


async def test_more_output_than_is_left_is_cut_and_not_refused(running: Running) -> None:
    answer = await post(running, COMPLETIONS, prompt=[7] * 2040, max_tokens=2048, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8
    for body in ({"prompt": [7] * 5, "max_tokens": 2049}, {"prompt": [7] * 2048}, {"prompt": "a fox " * 4000}):
        error = await refused(running, COMPLETIONS, **body)
        assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, ")
        assert error["code"] == "context_length_exceeded"


async def test_the_last_message_is_continued_and_echoed(start: Start) -> None:
    running = await start(next_token=scripted(IDS))
    options: dict[str, Any] = {"messages": PREFILLED, "max_tokens": 2, "return_prompt_text": True}
    whole = await post(running, CHATS, continue_final_message=True, echo=True, **options)
    assert whole["prompt_text"].endswith("The fox")
    content = whole["choices"][0]["message"]["content"]
    assert content == "The fox" + TOKENIZER.decode(IDS[:2])
    streamed = await chunks(running, CHATS, continue_final_message=True, echo=True, **options)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in streamed) == content
    assert streamed[0]["prompt_text"] == whole["prompt_text"]
    assert not any("prompt_text" in chunk for chunk in streamed[1:])
    plain = await post(running, CHATS, echo=True, **options | {"messages": CHAT})
    assert plain["choices"][0]["message"]["content"] == TOKENIZER.decode(IDS[:2])
    error = await refused(running, CHATS, continue_final_message=True, add_generation_prompt=True, **options)
    assert error["param"] == "continue_final_message"


async def test_templates_of_requests_need_the_operators_trust(running: Running, start: Start) -> None:
    for path in (CHATS, "/tokenize"):
        error = await refused(running, path, messages=CHAT, chat_template=TEMPLATE)
        assert (error["param"], "--trust-request-chat-template" in error["message"]) == ("chat_template", True)
    trusting = await start(settings={"trust_request_chat_template": True})
    found = await post(trusting, CHATS, messages=CHAT, chat_template=TEMPLATE, return_prompt_text=True, max_tokens=1)
    assert found["prompt_text"] == "[hello]"
    tokens = (await post(trusting, "/tokenize", messages=CHAT, chat_template=TEMPLATE))["tokens"]
    assert tokens == TOKENIZER.encode("[hello]", add_special_tokens=False)


async def test_documents_and_reasoning_effort_reach_the_template(start: Start) -> None:
    template = "{{ documents[0].text }} {{ reasoning_effort }} {{ enable_thinking }}"
    running = await start(settings={"chat_template": template})
    body = {"messages": CHAT, "max_tokens": 1, "return_prompt_text": True, "documents": [{"text": "d"}]}
    assert (await post(running, CHATS, reasoning_effort="low", **body))["prompt_text"] == "d low True"
    given = {"chat_template_kwargs": {"enable_thinking": "mine"}, "reasoning_effort": "none"}
    assert (await post(running, CHATS, **given, **body))["prompt_text"] == "d none mine"


async def test_tool_calls_of_a_history_reach_the_template(start: Start) -> None:
    running = await start(settings={"chat_template": "{{ messages | tojson }}"})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ]
    text = (await post(running, CHATS, messages=chat, max_tokens=1, return_prompt_text=True))["prompt_text"]
    call["function"] = {"name": "f", "arguments": {"x": 1}}
    assert json.loads(text) == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ]


# -- /tokenize


async def test_tokenize_serves_or_refuses_every_field(start: Start) -> None:
    running = await start(settings={"chat_template": "{{ tools | tojson }}{{ x }}{{ messages[-1].content }}</end>"})
    text = await post(running, "/tokenize", prompt="one two", return_token_strs=True)
    assert text["token_strs"] == TOKENIZER.token_names(text["tokens"])
    assert (await post(running, "/tokenize", prompt="one two"))["token_strs"] is None
    chat = await post(
        running,
        "/tokenize",
        messages=CHAT,
        tools=[{"type": "function", "function": {"name": "f"}}],
        chat_template_kwargs={"x": "y"},
        continue_final_message=True,
    )
    shown = '[{"type": "function", "function": {"name": "f"}}]yhello'
    assert chat["tokens"] == TOKENIZER.encode(shown, add_special_tokens=False)
    of_chats = {"tools": [{}], "continue_final_message": True, "chat_template_kwargs": {"x": 1}}
    for name, value in of_chats.items():
        assert (await refused(running, "/tokenize", prompt="x", **{name: value}))["param"] == name
    of_media: dict[str, Any] = {"mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": {}}}
    for name, value in of_media.items():
        assert (await refused(running, "/tokenize", messages=CHAT, **{name: value}))["param"] == name


# -- other paths


async def test_the_paths_of_vllms_server(running: Running, start: Start) -> None:
    [card] = (await running.http.get("/v1/models")).json()["data"]
    assert (card["root"], card["parent"], card["max_model_len"]) == (str(CHECKPOINT), None, 2048)
    for method in ("GET", "POST"):
        assert (await running.http.request(method, "/ping")).status_code == 200
    assert (await running.http.get("/load")).json() == {"server_load": 0}
    off = await running.http.get("/tokenizer_info")
    assert (off.status_code, "--enable-tokenizer-info" in off.json()["error"]["message"]) == (404, True)
    telling = await start(settings={"enable_tokenizer_info": True, "chat_template": TEMPLATE})
    info = (await telling.http.get("/tokenizer_info")).json()
    assert (info["chat_template"], isinstance(info["tokenizer_class"], str)) == (TEMPLATE, True)


async def test_usage_in_every_event_if_the_operator_wants_it(start: Start) -> None:
    """vLLM's --enable-force-include-usage."""
    forced = await start(settings={"force_include_usage": True})
    for path, asked in ((COMPLETIONS, {"prompt": [7, 8]}), (CHATS, {"messages": CHAT})):
        for options in ({}, {"stream_options": {"include_usage": False}}):
            events = await chunks(forced, path, **asked, **options, max_tokens=3, ignore_eos=True)
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert (counts, counts[-1]) == (sorted(counts), 3)
            assert events[-1]["choices"] == []


async def test_the_operator_may_have_tokens_named_by_their_ids(start: Start) -> None:
    """vLLM's --return-tokens-as-token-ids. A request may still say otherwise."""
    naming = await start(next_token=scripted(IDS), settings={"return_tokens_as_token_ids": True})
    options: dict[str, Any] = {"prompt": [7, 8], "max_tokens": len(IDS), "logprobs": 1}
    [named] = (await post(naming, COMPLETIONS, **options))["choices"]
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in IDS]
    [not_named] = (await post(naming, COMPLETIONS, **options, return_tokens_as_token_ids=False))["choices"]
    assert "".join(not_named["logprobs"]["tokens"]) == not_named["text"]


async def test_load_counts_the_online_sequences_that_run(start: Start) -> None:
    """Autoscalers and balancers read /load. It does not count offline sequences."""
    running = await start(step_s=0.01)
    body = {"prompt": [7], "n": 3, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    async with (
        running.http.stream("POST", COMPLETIONS, json=body) as online,
        running.http.stream("POST", COMPLETIONS, json=body | {"n": 2, "offline": True}) as offline,
    ):
        events = [answer.aiter_lines() for answer in (online, offline)]  # kept: a closed iterator ends its stream
        for each in events:
            await anext(each)
        assert running.scheduler.num_running == 5
        assert (await running.http.get("/load")).json() == {"server_load": 3}
    await until(lambda: running.scheduler.num_running == 0)
    assert (await running.http.get("/load")).json() == {"server_load": 0}


async def test_paths_may_have_the_prefix_of_a_proxy(start: Start) -> None:
    running = await start(settings={"root_path": "/llm/a"})
    for prefix in ("/llm/a", ""):
        assert (await running.http.get(prefix + "/v1/models")).status_code == 200
        assert (await running.http.get(prefix + "/v1/models/" + MODEL)).status_code == 200
        assert await post(running, prefix + COMPLETIONS, prompt=[7], max_tokens=1)
    assert (await running.http.get("/llm/v1/models")).status_code == 404


# -- errors


async def test_errors_have_vllms_types_and_numbers(running: Running) -> None:
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        (COMPLETIONS, {"prompt": [7], "temperature": -1}, 400, "BadRequestError"),
        (COMPLETIONS, {"prompt": [7], "model": "x"}, 404, "NotFoundError"),
        ("/v1/nothing", {}, 404, "NotFoundError"),
    ]
    for path, body, status, kind in cases:
        error = (await running.http.post(path, json=body)).json()["error"]
        assert (error["code"], error["type"]) == (status, kind)
    with pytest.raises(APIStatusError) as caught:
        await running.openai.completions.create(model=MODEL, prompt=[7] * 3000)
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == "prompt"
