"""Formats answers as bytes. The chunks of a stream differ in few parts; the other parts are formatted once."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import orjson

from paceline.v1.common_pb2 import FinishReason
from services.gateway.engine.generation import Generation
from services.gateway.engine.sequence_run import FINISH_NAMES
from services.gateway.engine.timings import timings
from services.gateway.openai.message import whole_message
from services.gateway.parsing.reply import ReplyFormat

Kind = Literal["completion", "chat", "message", "embedding"]
_ID_PREFIXES: dict[Kind, str] = {"completion": "cmpl-", "chat": "chatcmpl-", "message": "msg_", "embedding": "embd-"}
DONE = b"data: [DONE]\n\n"


def usage(generations: Sequence[Generation], num_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object over all choices. `num_tokens`: output tokens sent, if fewer than have arrived.

    `cached_tokens` is missing until the scheduler has reported it for every prompt, with the endings of the sequences.
    `reasoning_tokens` is missing if the model marks no reasoning.
    """
    prompts = [g for g in generations if not g.job.sample] or generations  # samples of one prompt share it
    prompt = sum(len(g.job.prompt_ids) for g in prompts)
    completion = sum(g.num_tokens for g in generations) if num_tokens is None else num_tokens
    value: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    cached = [g.cached_tokens for g in prompts if g.cached_tokens is not None]
    if len(cached) == len(prompts):
        value["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    reasoning = [g.num_reasoning for g in generations if g.num_reasoning is not None]
    if reasoning:
        value["completion_tokens_details"] = {"reasoning_tokens": min(sum(reasoning), completion)}
    return value


def new_answer_id(kind: Kind, name: str | None = None) -> str:
    """The answer's `id` for the client, made from `name` or from random digits."""
    return _ID_PREFIXES[kind] + (name or uuid.uuid4().hex)


class AnswerChoice(NamedTuple):
    """One choice of an answer, and why it ended: `stop_reason` is the stop string or stop token that ended it."""

    text: str
    finish_reason: FinishReason.ValueType
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    echo: str = ""  # before the text
    reply: ReplyFormat | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """What a request asks to see besides the text. `token_ids`: those of prompt and output. `tokens_as_ids`: log
    probabilities name tokens by their ids. `prompt_text`: the chat as the template writes it."""

    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_text: str | None = None


NOTHING_MORE = Shown()


class Envelope:
    """What all chunks of an answer share: id, Unix time, model, and what the request asks to see."""

    def __init__(self, kind: Kind, model: str, created_s: int, answer_id: str, shown: Shown = NOTHING_MORE) -> None:
        self.kind = kind
        self.model = model
        self.id = answer_id
        self.created = created_s
        self.shown = shown

    def head(self, object_name: str) -> dict[str, Any]:
        """The first fields of every body."""
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}

    def whole(self, choices: Sequence[AnswerChoice], usage: dict[str, Any], took: dict[str, Any]) -> bytes:
        """The body of an answer without streaming."""
        head = self.head("chat.completion" if self.kind == "chat" else "text_completion")
        shaped = [self._choice(index, choice) for index, choice in enumerate(choices)]
        body = {**head, "choices": shaped, "usage": usage, "timings": took}
        if self.kind == "chat":  # vLLM has them at this level
            body["prompt_logprobs"] = choices[0].prompt_logprobs
            body["prompt_token_ids"] = self._ids(choices[0].prompt_ids)
        if self.shown.prompt_text is not None:
            body["prompt_text"] = self.shown.prompt_text
        return orjson.dumps(body)

    def _ids(self, token_ids: Sequence[int]) -> list[int] | None:
        return list(token_ids) if self.shown.token_ids else None

    def _choice(self, index: int, choice: AnswerChoice) -> dict[str, Any]:
        finish_name = FINISH_NAMES[choice.finish_reason]
        if self.kind == "chat":
            message, finish_name = whole_message(
                choice.reply, choice.text, choice.finish_reason, echo=choice.echo, answer_id=self.id, choice=index
            )
            content: dict[str, Any] = {"message": message}
        else:
            text, prompt_ids = choice.echo + choice.text, self._ids(choice.prompt_ids)
            content = {"text": text, "prompt_logprobs": choice.prompt_logprobs, "prompt_token_ids": prompt_ids}
        return {
            "index": index,
            **content,
            "logprobs": choice.logprobs,
            "finish_reason": finish_name,
            "stop_reason": choice.stop_reason,
            "token_ids": self._ids(choice.token_ids),
        }


class StreamFormat:
    """Formats the server-sent events of one answer."""

    def __init__(
        self, envelope: Envelope, generations: Sequence[Generation], *, include_usage: bool, continuous_usage: bool
    ) -> None:
        self._chat = envelope.kind == "chat"
        self._shown = envelope.shown
        self._generations = generations
        # Choices that have not sent their last event yet. The very last of these events has the timings, unless a usage
        # event follows.
        self.num_open = len(generations)
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        head = orjson.dumps(envelope.head("chat.completion.chunk" if self._chat else "text_completion"))
        self._head = b"data: " + head[:-1] + b',"choices":['
        body = b'"delta":{"content":' if self._chat else b'"text":'
        self._text_heads = [b'%s{"index":%d,%s' % (self._head, i, body) for i in range(len(generations))]
        self._close = b"}" if self._chat else b""
        self._text_middle = self._middle(None)
        tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._plain_tail = self._text_middle + b"null}]" + tail
        self._tail = tail

    def first(self, index: int, echo: str | None, logprobs: dict[str, Any] | None) -> bytes:
        """The event before a choice's output. In a chat it has the role. In a completion it has the echoed prompt or
        the prompt's token ids; b"" if the request asks for neither."""
        tail = self._tail_of(index, num_tokens=0)
        prompt = b""
        if self._shown.token_ids:
            prompt = b',"prompt_token_ids":' + orjson.dumps(list(self._generations[index].job.prompt_ids))
        if self._chat:
            if self._shown.prompt_text is not None:
                prompt += b',"prompt_text":' + orjson.dumps(self._shown.prompt_text)
            delta = b'{"index":%d,"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null}]'
            return self._head + delta % (index, orjson.dumps(echo or "")) + prompt + tail
        if echo is None and not prompt:
            return b""
        ids = self._ids(())
        return b"".join(
            (
                self._text_heads[index],
                orjson.dumps(echo or ""),
                self._middle(logprobs),
                b"null",
                ids,
                prompt,
                b"}]",
                tail,
            )
        )

    def text(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, token_ids: Sequence[int] = ()
    ) -> bytes:
        """New text of a choice."""
        if self._continuous_usage or logprobs is not None or self._shown.token_ids:
            end = b"null" + self._ids(token_ids) + b"}]"
            return b"".join(
                (self._text_heads[index], orjson.dumps(text), self._middle(logprobs), end, self._tail_of(index))
            )
        return b"".join((self._text_heads[index], orjson.dumps(text), self._plain_tail))

    def last(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, token_ids: Sequence[int] = ()
    ) -> bytes:
        """The rest of a choice's text, and its finish reason."""
        reasons = self._reasons(index, FINISH_NAMES[self._generations[index].finish_reason])
        return b"".join(
            (
                self._text_heads[index],
                orjson.dumps(text),
                self._middle(logprobs),
                reasons,
                self._ids(token_ids),
                b"}]",
                self._last_tail_of(index),
            )
        )

    def delta(
        self,
        index: int,
        delta: bytes,
        logprobs: dict[str, Any] | None,
        token_ids: Sequence[int],
        finish_name: str | None = None,
    ) -> bytes:
        """A part of a chat's message as MessageWriter writes it. `finish_name`: given for the choice's last event."""
        reasons = b"null" if finish_name is None else self._reasons(index, finish_name)
        start = b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":' % (
            self._head,
            index,
            delta,
            orjson.dumps(logprobs),
        )
        tail = self._tail_of(index) if finish_name is None else self._last_tail_of(index)
        return b"".join((start, reasons, self._ids(token_ids), b"}]", tail))

    def _reasons(self, index: int, finish_name: str) -> bytes:
        stop_reason = orjson.dumps(self._generations[index].stop_reason)
        return b'"%b","stop_reason":%b' % (finish_name.encode(), stop_reason)

    def total(self) -> bytes:
        """The event after all choices: the usage, if the client asked for it."""
        if not self._include_usage:
            return b""
        return self._head + b'],"usage":' + orjson.dumps(usage(self._generations)) + self._timings() + b"}\n\n"

    def _timings(self) -> bytes:
        return b',"timings":' + orjson.dumps(timings(self._generations))

    def _last_tail_of(self, index: int) -> bytes:
        """The end of a choice's last event. llama.cpp has the timings in the last event of a stream."""
        self.num_open -= 1
        tail = self._tail_of(index)
        return tail if self.num_open or self._include_usage else self._timings() + tail

    def _ids(self, token_ids: Sequence[int]) -> bytes:
        return b',"token_ids":' + orjson.dumps(list(token_ids)) if self._shown.token_ids else b""

    def _middle(self, logprobs: dict[str, Any] | None) -> bytes:
        return self._close + b',"logprobs":' + orjson.dumps(logprobs) + b',"finish_reason":'

    def _tail_of(self, index: int, num_tokens: int | None = None) -> bytes:
        """The end of an event of this choice, with its usage so far over `num_tokens` (default: all) output tokens."""
        if not self._continuous_usage:
            return self._tail
        return b',"usage":' + orjson.dumps(usage([self._generations[index]], num_tokens)) + b"}\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """The event for a failure inside a stream. No terminator follows, because the answer is not complete."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
