"""Idempotency keys and resumed streams at gateways over loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from services.client import AsyncPacelineClient, InvalidRequest, PacelineError
from tests.contract.gateway.conftest import Running, Start, until, until_metrics
from tests.contract.gateway.fake_scheduler import hash_token
from tests.support.sse import Event, parse_events, told

PATH = "/v1/completions"
KEY = {"Idempotency-Key": "k"}


def body(**options: Any) -> dict[str, Any]:
    usage = {"include_usage": True}
    return {
        "prompt": [7, 8, 9],
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
        "stream_options": usage,
    } | options


async def events(
    running: Running,
    request: dict[str, Any],
    headers: Mapping[str, str],
    stop_after: int | None = None,
    path: str = PATH,
    lines: list[str] | None = None,
) -> list[Event]:
    """The events of a stream, or its first ones: then the connection is closed. `lines` gets each line as it comes."""
    lines = [] if lines is None else lines
    async with running.http.stream("POST", path, json=request, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            lines.append(line)
            if stop_after is not None and lines.count("") >= stop_after:
                break
    return list(parse_events(lines))


async def refused(running: Running, headers: dict[str, str], **options: Any) -> tuple[int, str | None, str]:
    answer = await running.http.post(PATH, json=body(**options), headers=headers)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


@pytest.mark.parametrize(("path", "n"), [(PATH, 1), (PATH, 3), ("/v1/chat/completions", 2)])
async def test_another_gateway_goes_on_without_a_seed(start: Start, path: str, n: int) -> None:
    first, second = await start(step_s=0.002), await start(step_s=0.001, tokens_per_step=3)
    request = body(n=n, max_tokens=400)  # so that some tokens are left, however many come in one event
    if path != PATH:
        del request["prompt"]
        request["messages"] = [{"role": "user", "content": "hello"}]
    undisturbed = await events(second, request, {"Idempotency-Key": "k"} | {"X-Request-ID": "a"}, path=path)
    third = await start(tokens_per_step=5)
    got = await events(first, request, KEY, 12, path)
    rest = await events(third, request, KEY | {"Last-Event-ID": got[-1].id}, path=path)
    assert len(got) == 12
    assert told([*got, *rest]).texts == told(undisturbed).texts
    assert told([*got, *rest]).reasons == told(undisturbed).reasons
    assert told([*got, *rest]).rest == told(undisturbed).rest
    assert len(told([*got, *rest]).heads) == 1
    # The seed comes from the idempotency key, so another key gives another text.
    other = await events(second, request, {"Idempotency-Key": "other"}, path=path)
    assert told(other).texts != told(undisturbed).texts


async def test_a_resumed_stream_keeps_the_id_that_explain_takes(start: Start) -> None:
    """Also when the first gateway submits the request again after the loss of its scheduler, and when another gateway
    resumes the stream."""
    first, second, request = await start(step_s=0.003), await start(), body(max_tokens=400)
    reading = asyncio.create_task(events(first, request, KEY, 40))
    await until(lambda: first.scheduler.num_running == 1)
    first.scheduler.break_streams()
    got = await reading
    rest = await events(second, request, KEY | {"Last-Event-ID": got[-1].id})
    shown = {json.loads(event.data)["id"] for event in [*got, *rest] if event.data != "[DONE]"}
    submissions = [*first.scheduler.submissions, *second.scheduler.submissions]
    assert len(submissions) == 3
    assert {submission.answer_id for submission in submissions} == shown
    assert len(shown) == 1


async def test_the_same_gateway_resumes_a_stream_without_a_second_run(start: Start) -> None:
    running, request = await start(step_s=0.003), body(max_tokens=400)
    got = await events(running, request, KEY, 5)
    running.scheduler.paused = True  # so that it does not end before all this has happened
    await until_metrics(running, "paceline_gateway_detached_requests 1.0")
    assert running.scheduler.num_running == 1
    running.scheduler.paused = False
    got += await events(running, request, KEY | {"Last-Event-ID": got[-1].id}, 3)
    got += await events(running, request, KEY | {"Last-Event-ID": got[-1].id})
    again = await events(running, request, KEY)
    assert told(got) == told(again)
    assert len(running.scheduler.submissions) == 1
    done = await running.http.post(PATH, json=request, headers=KEY | {"Last-Event-ID": got[-1].id})
    assert (done.status_code, done.content) == (204, b"")
    await until_metrics(
        running,
        "paceline_gateway_generation_tokens_total 400.0",
        'requests_total{endpoint="completion",finish_reason="length"} 1.0',
        "paceline_gateway_live_requests 0.0",
        "paceline_gateway_kept_answers 1.0",
        "paceline_gateway_taken_up_requests_total 3.0",
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_come_back_is_cancelled(start: Start, stream: bool) -> None:
    running = await start(step_s=0.005, settings={"resume_grace_s": 1.5})
    task = asyncio.create_task(
        running.http.post(PATH, json=body(max_tokens=2000, stream=stream, stream_options=None), headers=KEY)
    )
    await until(lambda: running.scheduler.num_running == 1)
    task.cancel()
    await until_metrics(running, "paceline_gateway_detached_requests 1.0")
    assert not running.scheduler.cancels
    await until(lambda: running.scheduler.num_running == 0)
    assert len(running.scheduler.cancels) == 1
    await until_metrics(running, "paceline_gateway_live_requests 0.0")


async def test_a_whole_answer_is_given_again(start: Start) -> None:
    running = await start(step_s=0.002)
    request = {"prompt": ["a", "b"], "max_tokens": 60, "ignore_eos": True, "n": 2, "logprobs": 1}
    lost = asyncio.create_task(running.http.post(PATH, json=request, headers=KEY))
    await until(lambda: running.scheduler.num_running == 4)
    lost.cancel()
    first = await running.http.post(PATH, json=request, headers=KEY)
    second = await running.http.post(PATH, json=dict(reversed(request.items())), headers=KEY)
    assert first.status_code == 200
    assert first.content == second.content
    assert len(running.scheduler.submissions) == 4
    # Each sample of each prompt has its own seed.
    assert len({submission.sampling.seed for submission in running.scheduler.submissions}) == 4


async def test_the_newest_connection_takes_over(start: Start) -> None:
    running = await start(step_s=0.002)
    begun: list[str] = []
    first = asyncio.create_task(events(running, body(max_tokens=400), KEY, lines=begun))
    request, key = body(max_tokens=400, stream=False, stream_options=None), {"Idempotency-Key": "w"}
    whole = asyncio.create_task(running.http.post(PATH, json=request, headers=key))
    await until(lambda: running.scheduler.num_running == 2 and "" in begun)
    running.scheduler.paused = True  # so that neither ends before it is taken over
    taking_over = asyncio.gather(
        events(running, body(max_tokens=400), KEY), running.http.post(PATH, json=request, headers=key)
    )
    await until(lambda: first.done() and whole.done())
    running.scheduler.paused = False
    second, again = await taking_over
    *cut, last = await first
    assert json.loads(last.data)["error"]["reason"] == "replaced"
    assert not last.id
    assert cut
    assert told(second).texts[0].startswith(told(cut).texts[0])
    assert ((await whole).status_code, again.status_code) == (409, 200)
    assert len(running.scheduler.submissions) == 2


async def test_the_idempotency_key_of_another_request_is_refused(start: Start) -> None:
    running = await start()
    assert told(await events(running, body(), KEY)).reasons == {0: ["length"]}
    status, param, message = await refused(running, KEY, max_tokens=61)
    assert (status, param) == (422, "Idempotency-Key")
    assert "another request" in message
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert (await running.http.post("/v1/chat/completions", json=chat, headers=KEY)).status_code == 422
    # Tenants have keys of their own.
    assert told(await events(running, body(max_tokens=61, tenant="t"), KEY)).reasons == {0: ["length"]}
    assert (await refused(running, KEY, max_tokens=61, user="t"))[0] == 422


async def test_a_body_that_is_nested_too_deep_for_its_fingerprint_is_refused_with_a_key(start: Start) -> None:
    """orjson reads more levels than it writes. Without a key, the gateway only reads the body."""
    running = await start()
    content = json.dumps(body())[:-1] + ', "metadata": {"x": ' + "[" * 400 + "]" * 400 + "}}"
    headers = {"content-type": "application/json"}
    assert (await running.http.post(PATH, content=content, headers=headers)).status_code == 200
    answer = await running.http.post(PATH, content=content, headers=headers | KEY)
    assert answer.status_code == 400
    assert "nested" in answer.json()["error"]["message"]


async def test_an_error_names_the_bad_header(start: Start) -> None:
    running = await start(next_token=hash_token(6, 200))
    for key in ("", "x" * 256, "a\tb"):
        status, param, message = await refused(running, {"Idempotency-Key": key})
        assert (status, param) == (400, "Idempotency-Key")
        assert "255" in message
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("nonsense", {}),
        ("1.00000000.1,2", {}),
        ("1.00000000.61", {}),
        ("1.00000000.60", {"stop_token_ids": list(range(6, 200))}),  # the answer ends before token 60
        ("1.00000000.3", {}),  # the checksum of another answer
        ("1.00000000.3", {"stream": False, "stream_options": None}),
        ("1.00000000.60e.u", {"stream_options": None}),
    ]
    for i, (last, options) in enumerate(wrong):
        headers = {"Idempotency-Key": str(i), "Last-Event-ID": last}
        status, param, message = await refused(running, headers, **options)
        assert (status, param) == (400, "Last-Event-ID")
    status, param, message = await refused(running, {"Last-Event-ID": "1.00000000.3"})
    assert (status, param) == (400, "Last-Event-ID")
    assert "Idempotency-Key" in message
    await until(lambda: running.scheduler.num_running == 0)


async def test_seeded_and_greedy_streams_can_be_resumed_without_a_key(start: Start) -> None:
    running = await start(step_s=0.002)
    for options in ({"seed": 5}, {"temperature": 0}):
        request = body(max_tokens=300, **options)
        request["stream_options"] = {"include_event_ids": True}
        got = await events(running, request, {}, 9)
        rest = await events(running, request, {"Last-Event-ID": got[-1].id})
        assert told([*got, *rest]).texts == told(await events(running, request, {})).texts


async def test_only_a_request_that_asks_for_event_ids_gets_them(running: Running) -> None:
    """The benchmark clients of vLLM and SGLang, and llmperf, fail at a line that does not begin with `data:`."""
    asking: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"Idempotency-Key": "new"}, {}),
        ({"Last-Event-ID": ""}, {}),
        ({}, {"stream_options": {"include_event_ids": True}}),
    ]
    for path in (PATH, "/v1/chat/completions"):
        request = body(max_tokens=3, n=2)
        if path != PATH:
            del request["prompt"]
            request["messages"] = [{"role": "user", "content": "a"}]
        plain = (await running.http.post(path, json=request)).text
        assert all(line.startswith("data: ") for line in plain.splitlines() if line)
        for given, options in asking:
            headers = {name: value and value + path for name, value in given.items()}
            answer = await running.http.post(path, json=request | options, headers=headers)
            found = list(parse_events(answer.text.splitlines()))
            assert len(found) > 4
            assert all(event.id for event in found), (path, headers)


async def test_a_request_that_failed_is_run_again(start: Start) -> None:
    running = await start(scheduler_up=False, settings={"scheduler_wait_s": 0.3})
    assert (await running.http.post(PATH, json=body(), headers=KEY)).status_code == 503
    await running.scheduler.start()
    await running.until_ready()
    assert (await running.http.post(PATH, json=body(), headers=KEY)).status_code == 200


async def test_a_gateway_that_stops_does_not_wait_for_lost_clients(start: Start) -> None:
    running = await start(step_s=0.01)
    await events(running, body(max_tokens=2000), KEY, 3)
    running.stop.set()
    await until(lambda: running.scheduler.num_running == 0)
    await asyncio.wait_for(running.task, 30)
    assert running.task.exception() is None


# -- over gRPC -----------------------------------------------------------------------------------------


async def test_grpc_goes_on_after_the_last_token(start: Start) -> None:
    gateways = [await start(step_s=0.003), await start(tokens_per_step=4)]
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, "idempotency_key": "k"}
    pieces = []
    async with AsyncPacelineClient(gateways[0].addresses.grpc or "") as client:
        async for piece in client.stream("once", **options):
            pieces.append(piece)
            if len(pieces) == 7:
                break
        seen = sum(len(piece.token_ids) for piece in pieces)
        rest = [piece async for piece in client.stream("once", **options, resume_after=seen)]
        whole = await client.generate("once", **options, request_id="second")
        assert len(gateways[0].scheduler.submissions) == 1
        end = [piece async for piece in client.stream("once", **options, resume_after=40)]
        assert [(piece.text, piece.token_ids, piece.finish_reason) for piece in end] == [("", [], "length")]
    async with AsyncPacelineClient(gateways[1].addresses.grpc or "") as client:
        elsewhere = [piece async for piece in client.stream("once", **options, resume_after=seen)]
    for after in (rest, elsewhere):
        assert "".join(piece.text for piece in [*pieces, *after]) == whole.text
        assert [token for piece in [*pieces, *after] for token in piece.token_ids] == whole.token_ids
        assert tuple(score for piece in [*pieces, *after] for score in piece.logprobs) == whole.logprobs
        assert after[-1].usage == whole.usage


async def test_grpc_refuses_wrong_idempotency_keys_and_resume_fields_by_name(start: Start) -> None:
    running = await start(step_s=0.005, next_token=hash_token(6, 200))
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        ends_before = {"idempotency_key": "m", "resume_after": 5, "stop_token_ids": list(range(6, 200))}
        with pytest.raises(InvalidRequest) as error:
            await client.generate("x", **ends_before)  # type: ignore[arg-type]
        assert error.value.field == "resume_after"
        first = asyncio.create_task(client.generate("x", max_tokens=60, ignore_eos=True, idempotency_key="k"))
        await until(lambda: running.scheduler.num_running == 1)
        running.scheduler.paused = True  # so that it does not end before it is taken over
        for options, field in (
            ({"idempotency_key": "k", "max_tokens": 5}, "idempotency_key"),
            ({"idempotency_key": "x" * 256}, "idempotency_key"),
            ({"resume_after": 3}, "resume_after"),
            ({"idempotency_key": "l", "resume_after": 6, "max_tokens": 5}, "resume_after"),
        ):
            with pytest.raises(InvalidRequest) as error:
                await client.generate("x", **options)
            assert error.value.field == field
        second = asyncio.create_task(client.generate("x", max_tokens=60, ignore_eos=True, idempotency_key="k"))
        with pytest.raises(PacelineError, match="another connection") as replaced:
            await first
        assert replaced.value.code.name == "ABORTED"
        running.scheduler.paused = False
        assert (await second).usage.completion_tokens == 60
