"""One request, from its submission to its ending."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.v1.common_pb2 import POOLING_MEAN, POOLING_UNSPECIFIED, Pooling, RetentionRange, SamplingParams
from paceline.v1.inference_pb2 import BeamOptions, Hypothesis
from scheduler_svc.core.requests.beams import BeamSearch, Candidates
from scheduler_svc.core.requests.phases import TRANSITIONS, Event, Phase
from scheduler_svc.core.requests.state import Held, History
from scheduler_svc.core.requests.trace import RequestTrace

TOKEN_BYTES = 4  # token ids are packed little-endian int32, in messages and in memory


class PrefixMatch(NamedTuple):
    """What one worker has of a request in its cache, as in paceline.v1.WorkerMatch."""

    num_tokens: int  # that need not be computed, also those in host memory
    num_referenced_tokens: int = 0
    num_host_tokens: int = 0  # the last ones of num_tokens; they need new blocks


NO_MATCH = PrefixMatch(0)


@dataclass(slots=True, eq=False)
class Siblings:
    """Shared by all sequences of one client request: its samples, or the beams of its search."""

    first: int  # arrival_index of the client's request
    num_bound: int = 0  # sequences that run or are about to run, on any worker


@dataclass(slots=True)
class SubmissionMetadata:
    """What a submission says of its request besides tokens and sampling. The beams of a search share it."""

    priority: float = 0.0  # larger is more urgent
    tenant: str = ""
    lora: str = ""
    answer_id: str = ""  # that the client sees; the same for all sequences of the client's request
    cache_salt: str = ""  # once accepted: the name that CacheNamespaces makes of tenant and salt
    cache_retention: tuple[RetentionRange, ...] = ()
    deadline_s: float = math.inf  # on the clock of Request.arrival_s
    ttft_slo_s: float = 0.0  # seconds from arrival within which the first token is wanted; 0: no goal
    offline: bool = False  # it runs on what online requests leave, and yields to them
    disable_speculation: bool = False
    conversation: str = ""  # the one that it continues; empty: none
    owner: str = ""  # name of the API key; empty: none
    min_slo_s: float = 0.0  # seconds after arrival; an order moves an earlier deadline or SLO to that time
    trace_id: str = ""  # of the client's trace, for the log; empty: none
    accepted_before: bool = False  # by this scheduler or another one
    pooling: Pooling.ValueType = POOLING_UNSPECIFIED  # of the vector that is wanted; unspecified: tokens are wanted


@dataclass(slots=True, eq=False)
class Family:
    """The other sequences of the client's request: samples of the same prompt, or beams of a search."""

    siblings: Siblings
    parent: Request | None = None  # the sequence to fork from, as long as that is possible
    samples: list[Request] | None = None  # of the same prompt, this one and finished ones included
    group: BeamGroup | None = None  # the beam group that it is the root or a member of
    hypotheses: list[Hypothesis] = field(default_factory=list)  # results of its beam search


@dataclass(slots=True, eq=False)
class Request:
    """A request in any phase, and everything known of it. Policies see it through RequestView.

    `arrival_index` orders requests by arrival, names them, and survives preemption and the loss of a worker.
    `queue_position` orders equal requests in the queue. It is the arrival index, or that of the first request of its
    conversation, unless a preemption policy changed it.
    """

    arrival_index: int
    session_id: str
    handle: int
    request_id: str
    prompt: bytes
    output: bytearray  # known output tokens; while RUNNING the last few are in the output buffer
    sampling: SamplingParams
    arrival_s: float
    metadata: SubmissionMetadata = field(default_factory=SubmissionMetadata, repr=False)
    trace: RequestTrace | None = None  # if spans are made of it
    phase: Phase = Phase.WAITING
    held: Held = field(default_factory=Held, init=False, repr=False)
    matches: dict[int, PrefixMatch] | None = None  # by worker; None until the cache has answered
    queue_position: int = 0
    history: History = field(default_factory=History, repr=False)
    kv_is_invalid: bool = False  # the worker could not compute it, so its KV is not reused
    is_suspect: bool = False  # its step failed; it runs only together with other suspects (faults/)
    extra_stop_ids: frozenset[int] = frozenset()
    family: Family = field(default=None, repr=False)  # type: ignore[assignment]  # by default its own
    view: RequestView | None = field(default=None, init=False, repr=False)  # the view that policies get
    # Derived from prompt, sampling and output, because every step reads them.
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # known tokens, prompt and output (exact while the request does not run)
    # Whether no cached KV may be reused: all of the prompt is computed, for its log probabilities (until they are
    # reported) or for the mean of its hidden states.
    needs_whole_prompt: bool = field(init=False)
    grammar: str = field(init=False)  # empty: none

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt) // TOKEN_BYTES
        self.num_tokens = self.num_prompt_tokens + len(self.output) // TOKEN_BYTES
        self.max_total_tokens = self.num_prompt_tokens + self.sampling.max_tokens
        self.grammar = self.sampling.grammar
        self.needs_whole_prompt = self.sampling.prompt_logprobs or self.metadata.pooling == POOLING_MEAN
        if self.family is None:
            self.family = Family(Siblings(self.arrival_index))

    def advance(self, event: Event) -> None:
        """Enter the next phase. Raises KeyError if the event cannot happen in this phase."""
        self.phase = TRANSITIONS[self.phase, event]

    def add_output(self, token_ids: bytes) -> None:
        """Append output tokens, packed int32."""
        self.output += token_ids
        self.num_tokens += len(token_ids) // TOKEN_BYTES

    @property
    def root(self) -> Request:
        """The client's request that it belongs to: itself, unless it is a beam."""
        return self if self.family.group is None else self.family.group.root

    @property
    def is_member(self) -> bool:
        """Whether it is a beam: part of a client's request, not the client's request itself."""
        return self.root is not self

    @property
    def is_further_sequence(self) -> bool:
        """Whether it is a sample after the first, or a beam, of a client's request for several sequences."""
        return self.family.siblings.first != self.arrival_index

    @property
    def is_one_of_several(self) -> bool:
        """Whether at least one other sample of its prompt has not ended."""
        return any(other is not self and other.phase is not Phase.ENDED for other in self.family.samples or ())

    @property
    def num_output_tokens(self) -> int:
        """Exact while the request does not run."""
        return len(self.output) // TOKEN_BYTES

    @property
    def num_generated_tokens(self) -> int:
        """Output tokens that have arrived, also while it runs."""
        if self.held.unflushed is None:
            return self.num_output_tokens
        buffer, slot = self.held.unflushed
        return self.num_output_tokens + buffer.num_tokens(slot)

    @property
    def max_new_tokens(self) -> int:
        return self.max_total_tokens - self.num_prompt_tokens

    @property
    def namespace(self) -> tuple[str, str]:
        """The adapter, and the name for tenant and salt. Requests share blocks only within one namespace."""
        return self.metadata.lora, self.metadata.cache_salt

    @property
    def token_ids(self) -> bytes:
        return self.prompt + self.output if self.output else self.prompt

    def tokens_from(self, start: int) -> bytes:
        """As `token_ids`, without the first `start` tokens. Does not copy the prompt for a part of the output."""
        if start >= self.num_prompt_tokens:
            return bytes(self.output[(start - self.num_prompt_tokens) * TOKEN_BYTES :])
        return self.token_ids[start * TOKEN_BYTES :]

    def match_on(self, worker: int) -> PrefixMatch:
        """What the worker has of the request: in its cache, swapped out, or in the parent that it forks from."""
        match = self.matches.get(worker, NO_MATCH) if self.matches else NO_MATCH
        if self.family.parent is None and not self.held.swapped_on:  # the common case
            return match
        all_but_one = self.num_tokens - 1
        if self.can_fork_on(worker):
            match = PrefixMatch(all_but_one, all_but_one)
        if self.held.swapped_on:
            return PrefixMatch(all_but_one if self.held.swapped_on == worker else 0, match.num_referenced_tokens)
        return match

    def can_fork_on(self, worker: int) -> bool:
        """Whether its parent is on that worker and has computed the prompt that both have in common."""
        return (
            self.family.parent is not None
            and self.family.parent.held.worker == worker
            and self.family.parent.held.prompt_is_computed
        )

    @property
    def waits_for_parent(self) -> bool:
        """Whether its parent is about to compute their common prompt. Not if the parent was preempted: other requests
        may run first."""
        parent = self.family.parent
        if parent is None or parent.held.prompt_is_computed or parent.history.num_preemptions:
            return False
        return parent.phase in (Phase.WAITING, Phase.ALLOCATING, Phase.RUNNING)

    @property
    def best_matched_tokens(self) -> int:
        """The most tokens that any worker has of it: cached, swapped out, or in the parent that it forks from."""
        if self.held.swapped_on or (
            self.family.parent and (self.family.parent.held.prompt_is_computed or self.waits_for_parent)
        ):
            return self.num_tokens - 1
        return max(self.matches.values(), default=NO_MATCH).num_tokens if self.matches else 0


@dataclass(slots=True, eq=False)
class BeamGroup:
    """`root` is the client's request. It never runs itself. It waits in the queue only while the model is not known."""

    root: Request
    options: BeamOptions
    search: BeamSearch | None = None  # once the model is known
    members: list[Request] = field(default_factory=list)  # one for each live beam, in the order of the search
    reports: dict[int, Candidates] = field(default_factory=dict)  # by index among the members
    parked: dict[int, int] = field(default_factory=dict)  # forks that still need a parked member, by arrival index


class RequestView:
    """A read-only view of a request, in any phase. Two views of the same request are equal."""

    # weakref: a policy that holds only a weak reference does not keep a finished request's tokens in memory
    __slots__ = ("__weakref__", "_request")
    _request: Request

    def __init__(self, request: Request) -> None:
        object.__setattr__(self, "_request", request)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a policy reads requests and changes nothing")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a policy reads requests and changes nothing")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestView) and other._request is self._request

    def __hash__(self) -> int:
        return self._request.arrival_index

    def __repr__(self) -> str:
        return f"<request {self._request.request_id!r}, {self.num_prompt_tokens}+{self.num_output_tokens} tokens>"

    @property
    def arrival_index(self) -> int:
        """Names the request, and orders requests by arrival."""
        return self._request.arrival_index

    @property
    def queue_position(self) -> int:
        """Orders equal requests in the queue: the arrival index, or that of the first request of its conversation,
        unless a preemption policy changed it."""
        return self._request.queue_position

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def tenant(self) -> str:
        return self._request.metadata.tenant

    @property
    def client_request(self) -> int:
        """Names the client's request: the same for all its samples, and for all beams of its search."""
        return self._request.family.siblings.first

    @property
    def is_beam(self) -> bool:
        """Whether it is a beam: it runs for one token, and its search goes on when all beams have run."""
        return self._request.is_member

    @property
    def num_running_siblings(self) -> int:
        """Sequences of the client's request that run or are about to run, on any worker, this one included."""
        return self._request.family.siblings.num_bound

    @property
    def lora(self) -> str:
        return self._request.metadata.lora

    @property
    def namespace(self) -> tuple[str, str]:
        """The adapter, and the name for tenant and salt. Only requests of one namespace can share cached blocks."""
        return self._request.namespace

    @property
    def priority(self) -> float:
        """Larger is more urgent."""
        return self._request.metadata.priority

    @property
    def offline(self) -> bool:
        """Whether it is an offline request. A step shows a policy requests of one class only."""
        return self._request.metadata.offline

    @property
    def arrival_s(self) -> float:
        return self._request.arrival_s

    @property
    def deadline_s(self) -> float:
        """On the clock of `arrival_s`; inf if there is none."""
        return self._request.metadata.deadline_s

    @property
    def first_token_due_s(self) -> float:
        """When the first token is wanted (`ttft_slo_s`), on the clock of `arrival_s`; inf if there is no goal."""
        request = self._request
        return request.arrival_s + request.metadata.ttft_slo_s if request.metadata.ttft_slo_s else math.inf

    @property
    def min_slo_s(self) -> float:
        """Seconds after the arrival. An order treats an earlier deadline or goal as if it were at that time. The API
        key sets it."""
        return self._request.metadata.min_slo_s

    @property
    def started_s(self) -> float | None:
        """When it first ran."""
        return self._request.history.started_s

    @property
    def has_run(self) -> bool:
        """Whether it was admitted before; now it waits again, or runs."""
        return self._request.history.has_run

    @property
    def num_preemptions(self) -> int:
        return self._request.history.num_preemptions

    @property
    def is_swapped(self) -> bool:
        """Whether it was preempted and has its KV in a worker's host memory: to resume there it computes one token."""
        return self._request.held.swapped_on > 0

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens that have arrived. `Running.num_output_tokens` also counts tokens in flight."""
        return self._request.num_generated_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        request = self._request
        if request.held.unflushed is None:  # the request's own record is complete
            return request.num_tokens
        return request.num_prompt_tokens + request.num_generated_tokens

    @property
    def max_new_tokens(self) -> int:
        return self._request.max_new_tokens

    @property
    def ignores_eos(self) -> bool:
        """Whether the request generates `max_new_tokens` tokens, unless a stop token of its own comes first."""
        return self._request.sampling.ignore_eos

    @property
    def max_total_tokens(self) -> int:
        return self._request.max_total_tokens

    @property
    def token_ids(self) -> bytes:
        """Prompt and output, packed little-endian int32."""
        return self._request.token_ids

    @property
    def best_matched_tokens(self) -> int:
        """The most tokens that any worker has of it: cached, swapped out, or in the parent that it forks from."""
        return self._request.best_matched_tokens

    def matched_tokens(self, worker_id: int) -> int:
        """Tokens of the request that the worker has: in its cache, swapped out, or in the parent that it forks from."""
        return self._request.match_on(worker_id).num_tokens

    def referenced_tokens(self, worker_id: int) -> int:
        """Of the matched tokens, those in blocks that other sequences reference. Reuse of these takes no block from the
        pool."""
        return self._request.match_on(worker_id).num_referenced_tokens


def view_of(request: Request) -> RequestView:
    """The only view of the request, so a policy may also compare views by identity."""
    view = request.view
    if view is None:
        view = request.view = RequestView(request)
    return view
