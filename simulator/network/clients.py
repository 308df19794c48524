"""The clients of a simulated Paceline: they ask, read, leave or lose their gateway, and come back for the rest.

A client comes back to the other gateway as real clients do (docs/resuming.md). The Python gRPC client brings the tokens
that it has, and the answer continues after them. An HTTP client brings its idempotency key. If a copy of its request
still runs there, or has finished there, the client reads that copy. Otherwise a new copy begins, and the client skips
the tokens that it has. The copy that a client has left may go on for a while. So a request may have several copies, and
the client reads the newest at its gateway. All copies are checked, also those that no client reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from paceline.v1.common_pb2 import FinishReason, SamplingParams
from paceline.v1.inference_pb2 import BeamOptions, Submission
from scheduler_svc.core.lifecycle.beam_groups import make_search
from services.gateway.engine.live_request import LiveRequest
from simulator.network.gateway_party import GatewayParty
from simulator.network.network import Network, Party
from simulator.schedule import NUM_GATEWAYS, ClientScript
from simulator.toy_worker import EOS, expected_hypotheses, expected_output, toy_logprob

RETRY_S = 0.2
DONE = (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)


@dataclass(slots=True, eq=False)
class Copy:
    """A client's request at one gateway. `requests`: its samples, once the gateway has taken it."""

    client: SimulatedClient
    gateway: GatewayParty
    requests: list[LiveRequest] = field(default_factory=list)
    num_brought: list[int] = field(default_factory=list)  # tokens of each that the client had
    num_checked: list[int] = field(default_factory=list)
    num_news: int = 0
    num_left: int = 0  # how often its client left
    cancelled: bool = False
    gone: bool = False  # together with its gateway

    @property
    def is_over(self) -> bool:
        return self.gone or (bool(self.requests) and all(request.ending is not None for request in self.requests))

    @property
    def failed(self) -> bool:
        return self.cancelled or any(r.ending is not None and r.ending.reason not in DONE for r in self.requests)

    def cancel(self) -> None:
        """Cancel the copy. Call this as an event of its gateway."""
        if self.is_over:
            return
        self.cancelled = True
        for request in self.requests:
            self.gateway.cancel(request)


class SimulatedClient:
    """`done`: the client has what it wanted, or wants nothing any more. `gone`: it lost its gateway or could not reach
    it, and does not come back."""

    def __init__(self, ask: ClientScript, name: str, clients: SimulatedClients) -> None:
        self.ask = ask
        self.name = name
        self.done = self.cancelled = self.gone = False
        self.copies: list[Copy] = []
        self.num_taken_up = 0
        self.num_at_once = 0  # most copies that were open at the same time
        self._clients = clients
        self._network = clients.network
        self._reads: Copy | None = None
        self._gateway = ask.gateway
        self._patience_s = ask.patience_s
        self.samplings = [
            SamplingParams(
                top_p=1,
                max_tokens=ask.max_tokens,
                seed=ask.seed + i,
                ignore_eos=ask.ignore_eos,
                logprobs=ask.logprobs,
                grammar=ask.grammar,
                top_k=ask.repeats,
            )
            for i in range(ask.n)
        ]
        self.rights = [expected_output(list(ask.prompt), sampling) for sampling in self.samplings]
        self.got: list[list[int]] = [[] for _ in self.samplings]

    def begin(self) -> None:
        if self.ask.cancel_after_s is not None:
            self._network.after(self.ask.cancel_after_s, self._cancel)
        if self.ask.breaks_after_s is not None:
            self._network.after(self.ask.breaks_after_s, self._break)
        self._try()

    def lost(self, gateway: Party) -> None:
        """The gateway has died, and the copies there with it. If the client was reading one of them, it comes back."""
        for copy in self.copies:
            copy.gone = copy.gone or copy.gateway is gateway
        if self._reads is not None and self._reads.gone and not self.done:
            self._come_back()

    def draining(self, gateway: Party) -> None:
        """Cancel copies at the gateway that no client reads."""
        for copy in self.copies:
            if copy.gateway is gateway and copy is not self._reads and not copy.is_over:
                copy.cancel()

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _try(self) -> None:
        if self.done:
            return
        gateway = self._clients.gateway(self._gateway)
        if not gateway.alive or gateway.leaving:
            self._come_back()
            return
        kept = [copy for copy in self.copies if copy.gateway is gateway and not copy.failed]
        if kept and not self.ask.brings_tokens:
            self._reads = copy = kept[-1]
            self.num_taken_up += 1
            gateway.perform(partial(self._take_up, copy))
        else:
            self._reads = copy = Copy(self, gateway)
            self.copies.append(copy)
            gateway.perform(partial(self._submit, copy))
        self.num_at_once = max(self.num_at_once, sum(not copy.is_over for copy in self.copies))
        if self._patience_s is not None:
            self._wait(copy, self._patience_s)
            self._patience_s *= 2  # otherwise a slow answer would never arrive

    def _come_back(self) -> None:
        self._reads = None
        if not self.ask.comes_back:
            self.done = self.gone = True
            return
        self._gateway = (self._gateway + 1) % NUM_GATEWAYS
        self._network.after(self._network.rng.uniform(0.0, RETRY_S), self._try)

    def _wait(self, copy: Copy, patience_s: float) -> None:
        num_news = copy.num_news

        def look() -> None:
            if self.done or self._reads is not copy:
                return
            if copy.num_news != num_news:
                self._wait(copy, patience_s)
                return
            self._leave(copy)

        self._network.after(patience_s, look)

    def _break(self) -> None:
        """The client's connection breaks, and the gateway does not notice yet."""
        if not self.done and self._reads is not None:
            self._leave(self._reads)

    def _leave(self, copy: Copy) -> None:
        """The client leaves the copy. `grace_s` later the gateway cancels it, unless the client has come back."""
        copy.num_left += 1
        num_left = copy.num_left

        def end() -> None:
            if copy.num_left == num_left and self._reads is not copy:
                copy.cancel()

        self._network.after(self.ask.grace_s, partial(copy.gateway.perform, end))
        self._come_back()

    def _cancel(self) -> None:
        if self.done:
            return
        self.done = self.cancelled = True
        for copy in self.copies:
            copy.gateway.perform(copy.cancel)

    # ── at the gateway ───────────────────────────────────────────────────────────────────────────────────────────────

    def _submit(self, copy: Copy) -> None:
        ask, gateway = self.ask, copy.gateway
        if gateway.leaving:
            copy.gone = True
            if self._reads is copy and not self.done:
                self._come_back()
            return
        first = 0
        for i, sampling in enumerate(self.samplings):
            beam = None
            if ask.beam_width:
                beam = BeamOptions(width=ask.beam_width, num_return=ask.beam_width)
            brought = self.got[i] if ask.brings_tokens else []
            own = SamplingParams()
            own.CopyFrom(sampling)
            request = gateway.submit(
                request_id=f"{gateway.name}-{self.name}-{len(self.copies)}-{i}",
                prompt_token_ids=np.array(ask.prompt, np.int32).tobytes(),
                sampling=own,
                final_tokens=frozenset() if ask.ignore_eos else frozenset([EOS]),
                metadata=Submission(fork_of=first),
                beam=beam,
                delivered=tuple(brought),
            )
            first = first or request.handle
            copy.requests.append(request)
            copy.num_brought.append(len(brought))
            copy.num_checked.append(len(brought))
            self._clients.by_request[id(request)] = copy, i
        for i, request in enumerate(copy.requests):
            if request.ending is not None:  # the client had everything but the ending
                self.news(copy, i)

    def _take_up(self, copy: Copy) -> None:
        if copy.failed and self._reads is copy:
            self._come_back()
            return
        for i in range(len(copy.requests)):
            self._read(copy, i)

    def news(self, copy: Copy, i: int) -> None:
        """Check each piece of an answer when it arrives."""
        request, right, start = copy.requests[i], self.rights[i], copy.num_checked[i]
        got = request.tokens
        copy.num_news += 1
        if not self.ask.beam_width:
            new, whole = got[start:], right[start : len(got)]
            assert new == whole, f"{request.request_id} got {new} at {start} of {right}"
        copy.num_checked[i] = len(got)
        if request.ending is not None and not copy.cancelled:
            self._check_ending(copy, i)
        self._read(copy, i)

    def _read(self, copy: Copy, i: int) -> None:
        if self.done or self._reads is not copy:
            return
        if copy.failed:  # its gateway's drain took too long
            self._come_back()
            return
        mine, request = self.got[i], copy.requests[i]
        mine += request.tokens[len(mine) :]
        if request.ending is not None and not self.ask.beam_width:
            assert mine == self.rights[i], f"the client of {request.request_id} has read {mine}"
        self.done = copy.is_over

    def _check_ending(self, copy: Copy, i: int) -> None:
        ask, request, brought = self.ask, copy.requests[i], copy.num_brought[i]
        ending, prompt = request.ending, list(ask.prompt)
        assert ending is not None
        if ask.logprobs:
            right = [toy_logprob([*prompt, *request.tokens[: j + 1]]) for j in range(brought, len(request.tokens))]
            given = [score.logprob for score in request.scores[brought:]]
            assert given == right, f"log probabilities of {request.request_id}"
        if copy.gateway.has_failed_all:
            return
        assert ending.reason in DONE, f"{request.request_id} ended with {ending}"
        if request.beam is None:
            assert request.tokens == self.rights[i], f"{request.request_id} ended early: {request.tokens}"
            return
        found = [(np.frombuffer(h.token_ids, np.int32).tolist(), h.score) for h in ending.hypotheses]
        expected = expected_hypotheses(prompt, make_search(request.beam, request.sampling, [EOS]))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], "wrong hypotheses"
        assert np.allclose([score for _, score in found], [score for _, score in expected])


class SimulatedClients:
    """All clients. `gateway` returns the gateway process that runs under a number now."""

    def __init__(self, network: Network, gateway: Callable[[int], GatewayParty]) -> None:
        self.network = network
        self.gateway = gateway
        self.all: list[SimulatedClient] = []
        self.by_request: dict[int, tuple[Copy, int]] = {}

    def ask(self, ask: ClientScript) -> None:
        client = SimulatedClient(ask, f"client-{len(self.all)}", self)
        self.all.append(client)
        client.begin()

    @property
    def copies(self) -> list[Copy]:
        return [copy for client in self.all for copy in client.copies]

    def unfinished(self) -> Iterator[str]:
        """The clients that still wait, and those that a gateway still works for."""
        for client in self.all:
            if not client.done:
                yield client.name
            for copy in client.copies:
                if not copy.is_over:
                    yield f"{client.name} at {copy.gateway.name}"

    def news(self, request: LiveRequest) -> None:
        copy, i = self.by_request[id(request)]
        copy.client.news(copy, i)

    def lost(self, gateway: Party) -> None:
        for client in self.all:
            client.lost(gateway)

    def draining(self, gateway: Party) -> None:
        for client in self.all:
            client.draining(gateway)
