"""Calls of a request break at every position. The client yields each token once and in order, or the final error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from services.client import AsyncPacelineClient, Overloaded, PacelineClient, PacelineError, Piece, Unavailable
from services.client.continuation import Continuation, Misplaced
from services.client.types import error_from, make_request, result_from

NUM_TOKENS = 12
CODES = grpc.StatusCode
PASSING = [CODES.UNAVAILABLE, CODES.CANCELLED]
FINAL = [CODES.INVALID_ARGUMENT, CODES.NOT_FOUND, CODES.INTERNAL, CODES.DEADLINE_EXCEEDED, CODES.ABORTED, CODES.UNKNOWN]


def token(request: inference_pb2.GenerateRequest, position: int) -> int:
    return (request.sampling.seed + 7 * position) % 1000


def messages(
    request: inference_pb2.GenerateRequest, sizes: list[int] | None = None, shift: int = 0
) -> Iterator[inference_pb2.GenerateResponse]:
    """The answer from the client's position on, in messages of these sizes. With `shift`, from a wrong position on."""
    position = request.resume_after
    expected = [token(request, i) for i in range(position)]
    assert list(request.resume_token_ids) == expected, "the client sends the tokens that it got"
    position = max(0, position + shift)
    sizes = list(sizes or [])
    while True:
        end = min(position + (sizes.pop(0) if sizes else 1), NUM_TOKENS)
        ids = [token(request, i) for i in range(position, end)]
        response = inference_pb2.GenerateResponse(token_ids=ids, text="".join(f"{i} " for i in ids), position=position)
        position = end
        if position == NUM_TOKENS:
            response.finish_reason = common_pb2.FINISH_REASON_LENGTH
            response.usage.completion_tokens = NUM_TOKENS
            yield response
            return
        yield response


def is_whole(pieces: list[Piece], seed: int) -> bool:
    request = inference_pb2.GenerateRequest()
    request.sampling.seed = seed
    right = [token(request, i) for i in range(NUM_TOKENS)]
    result = result_from(pieces)
    assert result.token_ids == right
    assert result.text == "".join(f"{i} " for i in right)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    return True


# Calls: the sizes of a call's messages, the shift of its first position from the right one, the code of its error.
CALLS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 4), max_size=5), st.sampled_from([0, 0, 0, -1, 1, -12, 5]), st.sampled_from(PASSING)
    ),
    max_size=6,
)


@given(CALLS)
def test_each_token_comes_once_and_in_order(calls: list[tuple[list[int], int, grpc.StatusCode]]) -> None:
    request = make_request("hi", None, None, "", {})
    going = Continuation(request, retry_for_s=30.0, timeout_s=None, now_s=0.0)
    pieces: list[Piece] = []
    now_s = 0.0
    for sizes, shift, code in calls:
        if going.ended:
            break
        sent, _ = going.call(now_s)
        error = error_from(code, "away", None)
        try:
            for response, _ in zip(messages(sent, sizes, shift), sizes, strict=False):
                pieces.append(going.take(response, now_s))
        except Misplaced as misplaced:
            assert shift
            error = misplaced
        if not going.ended:
            now_s += going.pause_s(error, now_s)
    if not going.ended:
        sent, _ = going.call(now_s)
        pieces += [going.take(response, now_s) for response in messages(sent)]
    assert is_whole(pieces, request.sampling.seed)


def test_retries_last_for_retry_for_s_after_the_last_token() -> None:
    request = make_request("hi", None, None, "", {"seed": 0})
    going = Continuation(request, retry_for_s=10.0, timeout_s=None, now_s=0.0)
    away = error_from(CODES.UNAVAILABLE, "away", None)
    now_s, pauses = 0.0, []

    def try_again() -> None:
        nonlocal now_s
        pauses.append(going.pause_s(away, now_s))
        now_s += pauses[-1]

    while now_s < 9.0:
        try_again()
    assert 0.0 < pauses[0] <= 0.05
    assert max(pauses) <= 1.0
    heard_s = now_s
    going.take(next(messages(going.call(now_s)[0])), now_s)
    while now_s < heard_s + 9.0:
        try_again()
    with pytest.raises(Unavailable, match="away"):
        going.pause_s(away, heard_s + 10.0)


def test_deadlines_hold_for_the_whole_answer() -> None:
    going = Continuation(
        make_request("hi", None, None, "", {"seed": 0, "deadline_s": 8.0}), retry_for_s=30.0, timeout_s=5.0, now_s=100.0
    )
    request, left_s = going.call(103.0)
    assert (request.deadline_s, left_s) == (5.0, 2.0)
    with pytest.raises(Unavailable):
        going.pause_s(error_from(CODES.UNAVAILABLE, "away", None), 104.99)
    assert going.call(109.0)[1] == 0.0


@pytest.mark.parametrize("code", FINAL)
def test_other_errors_are_raised_at_once(code: grpc.StatusCode) -> None:
    going = Continuation(make_request("hi", None, None, "", {}), retry_for_s=30.0, timeout_s=None, now_s=0.0)
    error = error_from(code, "no", None)
    with pytest.raises(PacelineError) as raised:
        going.pause_s(error, 0.0)
    assert raised.value is error


def test_a_full_queue_raises_overloaded_before_the_first_token() -> None:
    going = Continuation(make_request("hi", None, None, "", {}), retry_for_s=30.0, timeout_s=None, now_s=0.0)
    full = error_from(CODES.RESOURCE_EXHAUSTED, "full", [("retry-after-s", "4")])
    with pytest.raises(Overloaded):
        going.pause_s(full, 0.0)
    going.take(next(messages(going.call(0.0)[0])), 0.0)
    assert going.pause_s(full, 0.0) == 4.0


def test_a_reset_stream_is_retried_like_a_lost_connection() -> None:
    going = Continuation(make_request("hi", None, None, "", {}), retry_for_s=30.0, timeout_s=None, now_s=0.0)
    assert going.pause_s(error_from(CODES.INTERNAL, "Received RST_STREAM with error code 2", None), 0.0) < 1.0


@pytest.mark.parametrize(
    ("options", "has_seed"),
    [({}, True), ({"temperature": 0}, True), ({"idempotency_key": "k"}, False), ({"seed": 5}, True)],
)
def test_a_request_without_a_key_gets_a_seed(options: Any, has_seed: bool) -> None:
    request = make_request("hi", None, None, "", options)
    Continuation(request, retry_for_s=30.0, timeout_s=None, now_s=0.0)
    assert request.sampling.HasField("seed") == has_seed
    assert request.sampling.seed == options.get("seed", request.sampling.seed)
    untouched = make_request("hi", None, None, "", {})
    Continuation(untouched, retry_for_s=0, timeout_s=None, now_s=0.0)
    assert not untouched.sampling.HasField("seed")


def test_a_resume_by_hand_names_no_tokens() -> None:
    """The new process does not know the tokens. The server finds them by the key."""
    request = make_request("hi", None, None, "", {"idempotency_key": "k", "resume_after": 3})
    going = Continuation(request, retry_for_s=30.0, timeout_s=None, now_s=0.0)
    going.take(inference_pb2.GenerateResponse(token_ids=[1, 2], position=3), 0.0)
    sent, _ = going.call(0.0)
    assert (sent.resume_after, list(sent.resume_token_ids)) == (5, [])


# ── over loopback ────────────────────────────────────────────────────────────────────────────────────────────────────

Break = Callable[[Any], None]
BREAKS: dict[str, Break] = {
    "unavailable": lambda context: context.abort(CODES.UNAVAILABLE, "going down"),
    "cancelled": lambda context: context.abort(CODES.CANCELLED, "server stops"),
    "ends": lambda context: None,
    "lost": lambda context: context.cancel(),
}


class Dying(inference_pb2_grpc.InferenceServiceServicer):
    """Each call sends as many messages as `lives` says, and then breaks. The last call sends the whole answer.

    When a call fails, gRPC drops the messages that the client has not read. So the call breaks only when the client has
    `taken` all.
    """

    def __init__(self, lives: list[int], how: Break, shift: int = 0) -> None:
        self.lives = lives
        self.how = how
        self.shift = shift
        self.calls: list[inference_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.taken = threading.Semaphore(0)

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
        self.calls.append(request)
        context.add_callback(self.cancelled.set)
        if not self.lives:
            yield from messages(request)
            return
        num_left = self.lives.pop(0)
        for number, response in enumerate(messages(request, shift=self.shift)):
            if number == num_left:
                if not self.shift:
                    assert all(self.taken.acquire(timeout=20) for _ in range(num_left))
                self.how(context)
                return
            yield response


@contextmanager
def served(servicer: Dying) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def no_matter() -> None:
    pass


async def from_blocking(target: Any, taken: Callable[[], None] = no_matter, **options: Any) -> list[Piece]:
    """`taken` is called for each piece."""

    def ask() -> list[Piece]:
        pieces = []
        with PacelineClient(target) as client:
            for piece in client.stream("hi", **options):
                pieces.append(piece)
                taken()
        return pieces

    return await asyncio.to_thread(ask)


async def from_asyncio(target: Any, taken: Callable[[], None] = no_matter, **options: Any) -> list[Piece]:
    pieces = []
    async with AsyncPacelineClient(target) as client:
        async for piece in client.stream("hi", **options):
            pieces.append(piece)
            taken()
    return pieces


both = pytest.mark.parametrize("ask", [from_blocking, from_asyncio])


@both
@pytest.mark.parametrize("how", BREAKS)
async def test_a_server_that_dies_after_any_message_costs_no_token(ask: Any, how: str) -> None:
    lives = [*range(4), 0, 0]
    servicer = Dying(list(lives), BREAKS[how])
    with served(servicer) as target:
        pieces = await ask(target, servicer.taken.release)
    assert is_whole(pieces, servicer.calls[0].sampling.seed)
    assert len(servicer.calls) == len(lives) + 1
    assert [call.resume_after for call in servicer.calls] == [0, 0, 1, 3, 6, 6, 6]


@both
async def test_a_client_tries_each_server_and_takes_no_tokens_of_another_position(ask: Any) -> None:
    """The first server dies after three messages, the second sends wrong positions, the third does not exist."""
    dying, confused = Dying([3], BREAKS["unavailable"]), Dying([9], BREAKS["ends"], shift=-2)
    with served(dying) as first, served(confused) as second:
        pieces = await ask([first, second, "127.0.0.1:1"], dying.taken.release)
    assert is_whole(pieces, dying.calls[0].sampling.seed)
    assert [len(dying.calls), len(confused.calls)] == [2, 1]


@both
async def test_a_refusal_is_raised_at_once(ask: Any) -> None:
    servicer = Dying([2], lambda context: context.abort(CODES.INTERNAL, "broken"))
    with served(servicer) as target, pytest.raises(PacelineError, match="broken"):
        await ask(target, servicer.taken.release)
    assert len(servicer.calls) == 1


@both
async def test_a_timeout_holds_for_all_calls_together(ask: Any) -> None:
    with pytest.raises(PacelineError) as raised:
        await ask("127.0.0.1:1", timeout_s=0.3)
    assert raised.value.code in (CODES.UNAVAILABLE, CODES.DEADLINE_EXCEEDED)


@asynccontextmanager
async def stuck() -> AsyncIterator[tuple[Dying, AsyncPacelineClient, str]]:
    """A server that sends one message in each of two calls. The first call then fails, the second one waits."""
    release = threading.Event()
    servicer = Dying([1, 1], BREAKS["unavailable"])

    def how(context: Any) -> None:
        if len(servicer.calls) == 1:
            context.abort(CODES.UNAVAILABLE, "going down")
        release.wait(20)

    servicer.how = how
    with served(servicer) as target:
        async with AsyncPacelineClient(target) as client:
            try:
                yield servicer, client, target
            finally:
                release.set()


@pytest.mark.parametrize("how", ["close", "task"])
async def test_an_async_client_that_leaves_cancels_its_current_call(how: str) -> None:
    async with stuck() as (servicer, client, _):
        stream = client.stream("hi")
        await anext(stream)
        servicer.taken.release()
        await anext(stream)
        servicer.taken.release()
        servicer.cancelled.clear()
        if how == "close":
            await stream.aclose()  # type: ignore[attr-defined]
        else:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.to_thread(servicer.cancelled.wait)
        assert len(servicer.calls) == 2


async def test_a_blocking_client_that_leaves_cancels_its_request() -> None:
    async with stuck() as (servicer, _, target):

        def leave() -> None:
            with PacelineClient(target) as client:
                stream = client.stream("hi")
                next(stream)
                servicer.taken.release()
                next(stream)
                servicer.taken.release()
                servicer.cancelled.clear()
                stream.close()  # type: ignore[attr-defined]
                servicer.cancelled.wait()

        await asyncio.to_thread(leave)
        assert len(servicer.calls) == 2


def test_a_server_that_names_no_position_is_believed() -> None:
    continuation = Continuation(make_request("hi", None, None, "", {}), retry_for_s=1.0, timeout_s=None, now_s=0.0)
    for ids in ([5, 6], [7]):
        assert continuation.take(inference_pb2.GenerateResponse(token_ids=ids), 0.0).token_ids == ids
