"""A fake scheduler on loopback: it computes tokens by arithmetic, serves a real Session, and fails as a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np

from paceline.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    live_pb2,
    live_pb2_grpc,
)
from tests.support.ports import free_port

NextToken = Callable[[list[int], int, common_pb2.SamplingParams], int]


def hash_token(low: int, high: int) -> NextToken:
    """Token of a position: depends on prompt, position and seed alone, so a restart does not change it."""

    def next_token(prompt: list[int], position: int, sampling: common_pb2.SamplingParams) -> int:
        key = f"{prompt}{position}{sampling.seed if sampling.temperature else 0}".encode()
        return low + zlib.crc32(key) % (high - low)

    return next_token


def scripted(tokens: list[int]) -> NextToken:
    """The model repeats these tokens, for every prompt."""
    return lambda prompt, position, sampling: tokens[position % len(tokens)]


@dataclass
class Running:
    submission: inference_pb2.Submission
    prompt: list[int]
    output: int


@dataclass
class Stream:
    """One open session: its messages and its running requests."""

    session_id: str
    window: int
    read: int = 0
    sent: int = 0
    running: dict[int, Running] = field(default_factory=dict)
    endings: list[inference_pb2.Ending] = field(default_factory=list)
    embeddings: list[inference_pb2.Embedding] = field(default_factory=list)
    scores: list[inference_pb2.TokenScore] = field(default_factory=list)
    prompt_scores: list[inference_pb2.PromptScores] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = False
    num_submissions: int = 0


class FakeScheduler(
    inference_pb2_grpc.InferenceServiceServicer,
    live_pb2_grpc.LiveViewServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    """`step_s` is the time of a step, in which every running request gets `tokens_per_step` tokens."""

    def __init__(
        self, *, next_token: NextToken, model: common_pb2.ModelInfo, step_s: float = 0.0, tokens_per_step: int = 1
    ) -> None:
        self.next_token = next_token
        self.model = model
        self.step_s = step_s
        self.tokens_per_step = tokens_per_step
        self.ready = True
        self.full = False
        self.queue_limit = inference_pb2.QUEUE_LIMIT_UNSPECIFIED  # the limit that a full queue has reached
        self.places: int | None = None  # queue positions that it reports to gateways; None: it reports nothing
        self.cached_tokens = 3
        self.timing = inference_pb2.RequestTiming(queue_s=0.25, prefill_s=0.5, decode_s=1.5, num_preemptions=2)
        # Of an embedding model: the vector of an input, packed float32.
        self.vector: Callable[[list[int]], bytes] = lambda prompt: b""
        self.dies_after_embeddings = False  # the stream breaks once between an embedding and its ending
        self.load: dict[str, Any] = {}  # of all workers; heartbeats carry it unless it is empty
        self.paused = False
        self.reject: Callable[[inference_pb2.Submission], inference_pb2.Ending | None] = lambda submission: None
        # The kernel gives this port to no other process while this server is stopped.
        self.port = free_port()
        self.view = live_pb2.WatchResponse(load=inference_pb2.SchedulerLoad(), policies=admin_pb2.PolicyChoice())
        self.traced = live_pb2.TraceResponse(epoch=5)
        self.explanation: admin_pb2.ExplainResponse | grpc.StatusCode = grpc.StatusCode.NOT_FOUND
        self.policies = admin_pb2.PolicyChoice(preset="paceline", order="fcfs", options={"watermark": "0.1"})
        self.admin_refusal: tuple[grpc.StatusCode, str] | None = None  # of its admin calls
        # What has happened.
        self.admin_metadata: list[dict[str, Any]] = []
        self.num_watchers = self.num_watches = 0
        self.explained: list[admin_pb2.ExplainRequest] = []
        self.submissions: list[inference_pb2.Submission] = []
        self.cancels: list[int] = []
        self.conversations: set[str] = set()
        self.num_requests = 0
        self.streams: list[Stream] = []
        self.max_ahead = 0
        self._server: grpc.aio.Server | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_running(self) -> int:
        return sum(len(stream.running) for stream in self.streams if not stream.broken)

    async def start(self) -> None:
        """Listen; each time on the same port."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        live_pb2_grpc.add_LiveViewServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        for _ in range(100):
            with contextlib.suppress(RuntimeError):
                self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
                break
            await asyncio.sleep(0.05)
        await self._server.start()

    async def stop(self) -> None:
        """Die: everything that runs is lost."""
        for stream in self.streams:
            stream.broken = True
            stream.wake.set()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def break_streams(self) -> None:
        """The streams end with UNAVAILABLE, the server stays."""
        for stream in self.streams:
            stream.broken = True
            stream.wake.set()

    def set_ready(self, ready: bool) -> None:
        self.ready = ready
        for stream in self.streams:
            stream.wake.set()

    def set_full(self, full: bool) -> None:
        self.full = full
        for stream in self.streams:
            stream.wake.set()

    async def Watch(self, request: live_pb2.WatchRequest, context: Any) -> AsyncIterator[live_pb2.WatchResponse]:
        self.num_watches += 1
        self.num_watchers += 1
        try:
            while True:
                yield self.view
                await asyncio.sleep(request.interval_ms / 1000)
        finally:
            self.num_watchers -= 1

    async def Trace(
        self, request_iterator: AsyncIterator[live_pb2.TraceRequest], context: Any
    ) -> AsyncIterator[live_pb2.TraceResponse]:
        self.num_watchers += 1
        try:
            async for _ in request_iterator:
                yield self.traced
        finally:
            self.num_watchers -= 1

    async def GetTimeline(self, request: live_pb2.GetTimelineRequest, context: Any) -> live_pb2.GetTimelineResponse:
        self.explained.append(request.explain)
        if not isinstance(self.explanation, admin_pb2.ExplainResponse):
            await context.abort(self.explanation, "as scripted")
            raise AssertionError("abort never returns")
        return live_pb2.GetTimelineResponse(explained=self.explanation)

    async def GetPolicy(self, request: admin_pb2.GetPolicyRequest, context: Any) -> admin_pb2.GetPolicyResponse:
        await self._admit(context)
        return admin_pb2.GetPolicyResponse(choice=self.policies, presets=["paceline", "sglang"], orders=["fcfs", "lpm"])

    async def SetPolicy(self, request: admin_pb2.SetPolicyRequest, context: Any) -> admin_pb2.SetPolicyResponse:
        await self._admit(context)
        self.policies.MergeFrom(request.choice)
        return admin_pb2.SetPolicyResponse(choice=self.policies)

    async def _admit(self, context: Any) -> None:
        self.admin_metadata.append(dict(context.invocation_metadata()))
        if self.admin_refusal is not None:
            await context.abort(*self.admin_refusal)

    async def ReleaseConversation(
        self, request: inference_pb2.ReleaseConversationRequest, context: Any
    ) -> inference_pb2.ReleaseConversationResponse:
        if request.conversation not in self.conversations:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not known")
        self.conversations.remove(request.conversation)
        return inference_pb2.ReleaseConversationResponse()

    async def Session(
        self, request_iterator: AsyncIterator[inference_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[inference_pb2.SessionResponse]:
        first = await anext(aiter(request_iterator))
        assert first.HasField("open")
        assert first.open.response_window >= 1
        stream = Stream(first.open.session_id, first.open.response_window)
        self.streams.append(stream)
        self._take(stream, first)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            async for response in self._responses(stream):
                if response.heartbeat:
                    yield response
                    continue
                if self.places is not None:
                    response.room.places = self.places - len(stream.running)
                    response.room.num_submissions = stream.num_submissions
                stream.sent += 1
                self.max_ahead = max(self.max_ahead, stream.sent - stream.read)
                yield response
        finally:
            reader.cancel()
            stream.broken = True
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the fake scheduler was told to break")

    async def _read(self, stream: Stream, requests: AsyncIterator[inference_pb2.SessionRequest]) -> None:
        with contextlib.suppress(Exception):
            async for request in requests:
                assert not request.HasField("open")
                self._take(stream, request)
        stream.broken = True
        stream.wake.set()

    def _take(self, stream: Stream, request: inference_pb2.SessionRequest) -> None:
        self.num_requests += 1
        assert request.responses_read >= stream.read
        stream.read = request.responses_read
        for submission in request.submissions:
            self.submissions.append(submission)
            stream.num_submissions += 1
            assert submission.handle not in stream.running, "handle in use"
            if submission.conversation:
                self.conversations.add(submission.conversation)
            ending = self.reject(submission)
            if ending is not None:
                ending.handle = submission.handle
                stream.endings.append(ending)
                continue
            prompt = np.frombuffer(submission.prompt_token_ids, "<i4").tolist()
            if submission.sampling.prompt_logprobs:
                stream.prompt_scores += self._prompt_scores(submission, prompt)
            stream.running[submission.handle] = Running(submission, prompt, len(submission.output_token_ids) // 4)
        for handle in request.cancels:
            self.cancels.append(handle)
            if stream.running.pop(handle, None) is not None:
                self._end(stream, handle, common_pb2.FINISH_REASON_ABORT)
        stream.wake.set()

    async def _responses(self, stream: Stream) -> AsyncIterator[inference_pb2.SessionResponse]:
        yield inference_pb2.SessionResponse(opened=inference_pb2.SessionOpened(epoch=id(self)), status=self._status())
        reported = self.ready, self.full
        handles: list[int] = []
        tokens: list[int] = []
        while not stream.broken:
            if self.paused or not (stream.running or stream.endings or (self.ready, self.full) != reported):
                stream.wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stream.wake.wait(), 0.02 if self.paused else 0.1)
                if stream.broken:
                    return
                if self.load:
                    yield inference_pb2.SessionResponse(heartbeat=True, load=inference_pb2.SchedulerLoad(**self.load))
            if self.step_s:
                await asyncio.sleep(self.step_s)
            if not self.paused:
                self._step(stream, handles, tokens)
            if stream.embeddings and stream.sent - stream.read < stream.window:
                sent, stream.embeddings = stream.embeddings, []
                yield inference_pb2.SessionResponse(embeddings=sent)
                if self.dies_after_embeddings:
                    self.dies_after_embeddings = False
                    return
            if stream.sent - stream.read >= stream.window:
                # No credit: these results go with the next message.
                await asyncio.sleep(0.001)
                continue
            if handles or stream.endings or (self.ready, self.full) != reported:
                response = inference_pb2.SessionResponse(handles=handles, token_ids=np.asarray(tokens, "<i4").tobytes())
                response.scores.extend(stream.scores)
                response.prompt_scores.extend(stream.prompt_scores)
                stream.scores, stream.prompt_scores = [], []
                response.endings.extend(stream.endings)
                if (self.ready, self.full) != reported:
                    reported = self.ready, self.full
                    response.status.CopyFrom(self._status())
                handles, tokens = [], []
                stream.endings = []
                yield response
            await asyncio.sleep(0)

    def _step(self, stream: Stream, handles: list[int], tokens: list[int]) -> None:
        for handle, running in list(stream.running.items()):
            if running.submission.pooling:
                stream.embeddings.append(inference_pb2.Embedding(handle=handle, values=self.vector(running.prompt)))
                del stream.running[handle]
                self._end(stream, handle, common_pb2.FINISH_REASON_STOP)
                continue
            sampling = running.submission.sampling
            for _ in range(self.tokens_per_step):
                token = self.next_token(running.prompt, running.output, sampling)
                running.output += 1
                handles.append(handle)
                tokens.append(token)
                if sampling.logprobs:
                    top = np.arange(token, token + sampling.num_top_logprobs, dtype="<i4")
                    stream.scores.append(
                        inference_pb2.TokenScore(
                            handle=handle,
                            logprob=-(sampling.seed % 10),
                            top_token_ids=top.tobytes(),
                            top_logprobs=(token - top - sampling.seed % 10).astype("<f4").tobytes(),
                        )
                    )
                final = token in sampling.stop_token_ids or (
                    token in self.model.eos_token_ids and not sampling.ignore_eos
                )
                if running.output >= sampling.max_tokens or final:
                    del stream.running[handle]
                    reason = common_pb2.FINISH_REASON_STOP if final else common_pb2.FINISH_REASON_LENGTH
                    self._end(stream, handle, reason)
                    break

    @staticmethod
    def _prompt_scores(submission: inference_pb2.Submission, prompt: list[int]) -> list[inference_pb2.PromptScores]:
        """In two parts. The first comes twice, as after a preemption. Token i has log probability -i / 8 and rank i."""
        places, num_top = np.arange(1, len(prompt)), submission.sampling.num_top_prompt_logprobs
        middle = len(places) // 2
        parts = [part for part in (places[:middle], places[:middle], places[middle:]) if len(part)]
        return [
            inference_pb2.PromptScores(
                handle=submission.handle,
                logprobs=common_pb2.PromptLogprobs(
                    start=part[0],
                    logprobs=(-part / 8).astype("<f4").tobytes(),
                    ranks=part.astype("<i4").tobytes(),
                    top_token_ids=(part[:, None] + np.arange(num_top)).astype("<i4").tobytes(),
                    top_logprobs=np.tile(-np.arange(num_top) / 4, (len(part), 1)).astype("<f4").tobytes(),
                ),
            )
            for part in parts
        ]

    def _end(self, stream: Stream, handle: int, reason: common_pb2.FinishReason.ValueType) -> None:
        stream.endings.append(
            inference_pb2.Ending(handle=handle, reason=reason, cached_tokens=self.cached_tokens, timing=self.timing)
        )

    def _status(self) -> inference_pb2.SchedulerStatus:
        status = inference_pb2.SchedulerStatus(
            num_workers=int(self.ready), ready=self.ready, full=self.full, queue_limit=self.queue_limit
        )
        if self.ready:
            status.model.CopyFrom(self.model)
        return status
