"""What is recorded of a traced request besides its timeline. When the request ends, both become its spans."""

from __future__ import annotations

from dataclasses import dataclass, field

# Chunks that one request keeps: 2 million tokens of a prompt in chunks of 2,048. Later chunks are only counted.
MAX_CHUNKS = 1024


@dataclass(slots=True)
class TracedChunk:
    """Known tokens of the request that one step computed."""

    worker: int
    step: int  # of that worker's link
    num_tokens: int
    samples: bool  # it is the last one, and yields a token
    sent_s: float
    ended_s: float | None = None  # when the result came; None: it did not come, or came too late to count


@dataclass(slots=True, eq=False)
class RequestTrace:
    """The span that the request's spans are children of, and the chunks so far. Ids are hexadecimal digits."""

    trace_id: str
    parent_id: str
    chunks: list[TracedChunk] = field(default_factory=list)
    num_chunks: int = 0

    def sent(self, worker: int, step: int, num_tokens: int, *, samples: bool, now_s: float) -> None:
        """A plan with a chunk of the request leaves for the worker."""
        self.num_chunks += 1
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(TracedChunk(worker, step, num_tokens, samples, now_s))

    def ended(self, worker: int, step: int, now_s: float) -> None:
        """The result of that step has come in time: note when the request's chunk in it ended."""
        for chunk in reversed(self.chunks):  # it is one of the last: few steps are in flight
            if (chunk.worker, chunk.step) == (worker, step):
                chunk.ended_s = now_s
                return
