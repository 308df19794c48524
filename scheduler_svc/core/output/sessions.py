"""Sessions bring tokens and endings to a gateway: one message for each step, as long as the reader has credit."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from paceline.v1.common_pb2 import PromptLogprobs
from paceline.v1.inference_pb2 import (
    Embedding,
    Ending,
    PromptScores,
    SchedulerStatus,
    SessionOpened,
    SessionResponse,
    TokenScore,
)
from paceline.v1.worker_pb2 import TokenLogprobs
from scheduler_svc.core.arrays import Longs, Tokens
from scheduler_svc.core.requests.request import Request

# Most bytes of prompt log probabilities and embeddings in a message, unless a single part is larger. Far below the
# message limit.
MAX_SCORE_BYTES = 4 * 2**20
# Limits of a message to a slow reader: log probabilities of tokens (about 180 bytes each, with the 20 likeliest), and
# steps.
MAX_SCORES, MAX_STEPS = 2**14, 256


@dataclass(slots=True, eq=False)
class Session:
    """The requests of one gateway, or of a single gRPC call.

    Output that a slow reader has no credit for gathers here (at most the tokens that its own requests may still
    generate), and goes in messages of a bounded size.
    """

    id: str
    index: int  # names the session in the slot ledgers
    window: int
    live: dict[int, Request] = field(default_factory=dict)  # by handle
    sent: int = 0
    read: int = 0
    num_submissions: int = 0  # of online requests, accepted or not
    queue_credit: int = 0  # online requests that the queue still takes
    _sent_credit: tuple[int, int] | None = None
    opened: SessionOpened | None = None
    status: SchedulerStatus | None = None
    _handles: list[Longs] = field(default_factory=list)
    _tokens: list[Tokens] = field(default_factory=list)
    _scores_before: list[int] = field(default_factory=list)  # for each entry of `_tokens`: scores gathered before it
    _sent_handles: Longs | None = None  # handles of the last message, if they came as one array
    _next: SessionResponse | None = None  # with the endings, which gather in place: adding them later would copy them
    _scores: list[TokenScore] = field(default_factory=list)
    _large: deque[PromptScores | Embedding] = field(default_factory=deque)  # sent before all else

    def add_tokens(self, handles: Longs, tokens: Tokens) -> None:
        self._handles.append(handles)
        self._tokens.append(tokens)
        self._scores_before.append(len(self._scores))

    def add_score(self, handle: int, score: TokenLogprobs) -> None:
        """Add the score of the request's latest token."""
        top, logprobs = score.top_token_ids, score.top_logprobs
        self._scores.append(TokenScore(handle=handle, logprob=score.logprob, top_token_ids=top, top_logprobs=logprobs))

    def add_prompt_scores(self, handle: int, logprobs: PromptLogprobs) -> None:
        """Add log probabilities of a part of the request's prompt."""
        self._large.append(PromptScores(handle=handle, logprobs=logprobs))

    def add_embedding(self, handle: int, values: bytes) -> None:
        """Add the vector of the request, packed float32."""
        self._large.append(Embedding(handle=handle, values=values))

    def add_ending(self) -> Ending:
        """A new ending; the caller fills it in."""
        if self._next is None:
            self._next = SessionResponse()
        return self._next.endings.add()

    def next_message(self) -> SessionResponse | None:
        """The gathered output, if there is any and the reader has credit."""
        if self.sent - self.read >= self.window:
            return None
        if self._large:
            message = self._next_large()
        elif len(self._scores) > MAX_SCORES or len(self._handles) > MAX_STEPS:
            message = self._first_steps()
        elif self._handles or self._next or self.status or self.opened:
            message = self._all_steps()
        else:
            return None
        if self.opened:
            message.opened.CopyFrom(self.opened)
        if self.status:
            message.status.CopyFrom(self.status)
        self.opened = self.status = None
        self.sent += 1
        return message

    def _all_steps(self) -> SessionResponse:
        """All gathered steps with their log probabilities, and the endings."""
        message, self._next = self._next or SessionResponse(), None
        if len(self._handles) == 1 and self._handles[0] is self._sent_handles:
            message.same_handles = True
        elif self._handles:
            for handles in self._handles:
                message.handles.extend(handles.tolist())
            self._sent_handles = self._handles[0] if len(self._handles) == 1 else None
        message.token_ids = b"".join([tokens.tobytes() for tokens in self._tokens])
        if self._scores:
            message.scores.extend(self._scores)
        for gathered in (self._handles, self._tokens, self._scores, self._scores_before):
            gathered.clear()
        if (credit := (self.queue_credit, self.num_submissions)) != self._sent_credit:
            message.room.places, message.room.num_submissions = self._sent_credit = credit
        return message

    def _first_steps(self) -> SessionResponse:
        """As many gathered steps as fit a message, with their log probabilities. Endings come with the last steps."""
        message, before = SessionResponse(), self._scores_before
        count = max(1, min(bisect_right(before, MAX_SCORES) - 1, MAX_STEPS))
        num_scores = before[count] if count < len(before) else len(self._scores)
        for handles in self._handles[:count]:
            message.handles.extend(handles.tolist())
        message.token_ids = b"".join([tokens.tobytes() for tokens in self._tokens[:count]])
        message.scores.extend(self._scores[:num_scores])
        del self._handles[:count], self._tokens[:count], self._scores[:num_scores]
        self._scores_before = [before - num_scores for before in self._scores_before[count:]]
        self._sent_handles = None
        return message

    def _next_large(self) -> SessionResponse:
        """As many prompt log probabilities and embeddings as fit a message. They go before the tokens and endings that
        follow."""
        message, size = SessionResponse(), 0
        while self._large and (not size or size + self._large[0].ByteSize() <= MAX_SCORE_BYTES):
            size += self._large[0].ByteSize()
            match self._large.popleft():
                case Embedding() as embedding:
                    message.embeddings.append(embedding)
                case scores:
                    message.prompt_scores.append(scores)
        return message


class Publisher:
    """Brings the workers' output to its sessions."""

    def __init__(self, sessions: dict[str, Session]) -> None:
        self._sessions = sessions  # by id
        self._at: dict[int, Session] = {}  # by index
        self._next = 0

    def open(self, session_id: str, window: int) -> Session:
        """Open a session, with a new index."""
        session = self._sessions[session_id] = self._at[self._next] = Session(session_id, self._next, window)
        self._next += 1
        return session

    def closed(self, session: Session) -> None:
        del self._at[session.index]

    def index_of(self, request: Request) -> int:
        """The index of the request's session."""
        return self._sessions[request.session_id].index

    def tokens(self, session: int, sessions: Longs, handles: Longs, tokens: Tokens) -> None:
        """Publish a token for each handle. `session`: the index of the session of all handles. If it is negative,
        `sessions` has an index for each handle."""
        if session >= 0:
            self._at[session].add_tokens(handles, tokens)
            return
        for index in np.unique(sessions).tolist():
            mine = sessions == index
            self._at[index].add_tokens(handles[mine], tokens[mine])

    def score(self, request: Request, score: TokenLogprobs) -> None:
        self._sessions[request.session_id].add_score(request.handle, score)

    def prompt_scores(self, request: Request, scores: PromptLogprobs) -> None:
        self._sessions[request.session_id].add_prompt_scores(request.handle, scores)

    def embedding(self, request: Request, values: bytes) -> None:
        self._sessions[request.session_id].add_embedding(request.handle, values)
