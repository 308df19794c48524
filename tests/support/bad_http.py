"""Requests of a broken or hostile HTTP client, each with the status and the field that the error must have.

`_completion` and `_chat` merge the fields of a case into a valid request. All other cases have a body of their own.
Input that is odd but valid gets a 200.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = (b"content-type", b"application/json")


@dataclass(frozen=True)
class Case:
    name: str
    status: int
    param: str | None = None
    content: bytes = b""
    path: str = COMPLETIONS
    headers: tuple[tuple[bytes, bytes], ...] = (JSON,)


@dataclass(frozen=True)
class RawCase:
    """Bytes on a socket. `statuses`: the statuses that are right; 0: a close without an answer."""

    name: str
    statuses: tuple[int, ...]
    data: bytes
    closes: bool = field(default=False)  # whether the client closes its side after the data


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _completion(name: str, status: int, param: str | None, **fields: Any) -> Case:
    return Case(name, status, param, _dump({"prompt": [5, 6], "max_tokens": 2, **fields}))


def _chat(name: str, status: int, param: str | None, **fields: Any) -> Case:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
    return Case(f"chat: {name}", status, param, _dump(body), CHATS)


def _content(name: str, status: int, param: str | None, content: Any) -> Case:
    return _chat(f"content {name}", status, param, messages=[{"role": "user", "content": content}])


def _body(name: str, status: int, content: bytes, param: str | None = None, *headers: tuple[bytes, bytes]) -> Case:
    return Case(f"body: {name}", status, param, content, headers=headers or (JSON,))


def _field(name: str, *values: Any, status: int = 400) -> list[Case]:
    return [
        _completion(f"{name} {value!r:.30}", status, name if status == 400 else None, **{name: value})
        for value in values
    ]


def _number(name: str, text: bytes, status: int = 400) -> Case:
    """A number as text: NaN, infinite, or too large for a float."""
    content = b'{"prompt": [5], "max_tokens": 2, "%s": %s}' % (name.encode(), text)
    return _body(f"{name} {text.decode()}", status, content, name)


BODIES = [
    _body("none", 400, b""),
    _body("truncated", 400, b'{"prompt": [5'),
    _body("100 MB", 413, b'{"prompt": "' + b"x" * 100_000_000 + b'"}'),
    _body("lists of depth 100,000", 400, b"[" * 100_000),
    _body("objects of depth 100,000", 400, b'{"prompt":' * 100_000 + b"1" + b"}" * 100_000),
    _body("depth 100,000 in an unknown field", 400, b'{"prompt":[5],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    _body("a key twice, the last one counts", 200, b'{"prompt": [5], "max_tokens": -1, "max_tokens": 2}'),
    _body(
        "a key twice, the last one is wrong", 400, b'{"prompt": [5], "max_tokens": 2, "max_tokens": -1}', "max_tokens"
    ),
    _body("lone surrogate", 400, b'{"prompt": "\\ud800"}'),
    _body("invalid UTF-8", 400, b'{"prompt": "\xff\xfe"}'),
    _body("overlong UTF-8", 400, b'{"prompt": "\xc0\xaf"}'),
    _body("byte order mark", 400, b'\xef\xbb\xbf{"prompt": [5]}'),
    _body("UTF-16", 400, '{"prompt": [5]}'.encode("utf-16")),
    _body("NUL bytes", 400, b"\0" * 100),
    _body("NUL in a prompt", 200, b'{"prompt": "a\\u0000b", "max_tokens": 2}'),
    _body("a list", 400, b"[]"),
    _body("null", 400, b"null"),
    _body("a string", 400, b'"prompt"'),
    _body("NaN alone", 400, b"NaN"),
    _body("trailing bytes", 400, b'{"prompt": [5]}{}'),
    _body("comments", 400, b'{"prompt": [5] /* why */}'),
    _body("a gzip bomb", 415, gzip.compress(bytes(1_000_000)), None, JSON, (b"content-encoding", b"gzip")),
    _body("text", 415, b'{"prompt": [5]}', None, (b"content-type", b"text/plain")),
    _body("multipart", 415, b"--x--", None, (b"content-type", b"multipart/form-data; boundary=x")),
    _number("temperature", b"NaN"),
    _number("temperature", b"Infinity"),
    _number("temperature", b"-Infinity"),
    _number("top_p", b"1e999"),
    _number("seed", b"1e999"),
    # The error names no field if the JSON parser does not accept the number.
    _body("a number of 5,000 digits", 400, b'{"prompt": [5], "max_tokens": %s}' % (b"9" * 5000)),
    _body("a number with leading zeros", 400, b'{"prompt": [5], "max_tokens": 007}'),
    _body("a number without digits", 400, b'{"prompt": [5], "max_tokens": -}'),
]

FIELDS = [
    *_field("temperature", -1, -1e-9, 1e30, "one", "nan", True, [], {}),
    *_field("temperature", 1e-30, 0, None, "1", "1.5e0", status=200),
    *_field("top_p", 0, -0.5, 1.0001, "-1", True),
    *_field("top_k", -2, 2**31, 2**63, 1.5, "1.5", True),
    *_field("top_k", "1", 1.0, "1.0", status=200),
    *_field("min_p", 1.0001, -0.1, 1e30),
    *_field("typical_p", 0, 1.5, -1),
    *_field("presence_penalty", 1e9, -1e9, "x"),
    *_field("frequency_penalty", 1e9, -1e9, True),
    *_field("repetition_penalty", 0, -1, 1e9),
    *_field("n", 0, -1, 10**6, 1.5, True, "2.5"),
    *_field("best_of", 0, -1, 10**6),
    *_field("max_tokens", 0, -1, 2**31, 2**63, 2**64, 10**30, 1.5, True, "x5", "9" * 5000, []),
    *_field("max_tokens", 1.0, "5", " 5 ", status=200),
    *_field("min_tokens", 3, -1, 2**63),
    *_field("seed", -(2**63) - 1, 2**64, 2**80, 1.5, "x", True),
    *_field("seed", 0, 2**63 - 1, status=200),
    *_field("logprobs", -1, 10**6, "5.5", 1.5),
    *_field("prompt_logprobs", -1, 10**6, True),
    *_field("stop", ["x"] * 10_000, [""], "", ["x" * 1_000_000], 5, [5], {"a": 1}),
    *_field("stop_token_ids", [-1], [10**6], [2**63], "5", [5] * 100_000),
    _completion("a stop token of 1.5", 400, "stop_token_ids.0", stop_token_ids=[1.5]),
    _completion("a stop token that is true", 400, "stop_token_ids.0", stop_token_ids=[True]),
    _completion("a bias that is no number", 400, "logit_bias.5", logit_bias={"5": "x"}),
    *_field("logit_bias", {"abc": 1}, {"-1": 1}, {"1000000": 1}, {"5": 1e30}, {"5": 1, "05": 1}, [1], "x"),
    *_field("logit_bias", {str(i): 1 for i in range(100_000)}),
    *_field("bad_words", [""], [[]], [[-1]], [["x"]], "word", ["x"] * 10_000, [[5] * 100_000]),
    *_field("allowed_token_ids", [], [-1], [10**6], "x", [5] * 100_000),
    *_field("stream", "yes", 1, []),
    *_field("stream_options", {"include_usage": True}, 5),
    _completion("include_usage x", 400, "stream_options.include_usage", stream_options={"include_usage": "x"}),
    *_field("priority", "high", 1e39, True, []),
    *_field("deadline_s", 0, -1, 1e39, "soon"),
    *_field("tenant", 7, "x" * 129, []),
    *_field("cache_salt", 7, ["x"]),
    *_field("user", 7, ["x"]),
    *_field("length_penalty", 2.0, "x"),
    *_field("early_stopping", True, "soon"),
    *_field("tools", [{"type": "function"}], "x"),
    *_field("guided_regex", "(a+)+$"),
    *_field("guided_choice", [str(i) for i in range(1_000_000)]),
    *_field("guided_json", {"$ref": "#"}),
    *_field("echo", "yes", 1, [True]),
    *_field("suffix", "end"),
    _completion("unknown model", 404, "model", model="unknown"),
    _completion("a model of a million characters", 404, "model", model="x" * 1_000_000),
    _completion("a model that is a path", 404, "model", model="../../etc/passwd"),
    _completion("model 7", 400, "model", model=7),
    _completion("an unknown field", 400, "whatever", whatever={"x": [1]}),
    _completion("use_beam_search with stream", 400, "stream", use_beam_search=True, stream=True),
    _completion("use_beam_search 5", 400, "use_beam_search", use_beam_search=5),
    _completion("beam search that samples", 400, "temperature", use_beam_search=True, temperature=1.0),
    _completion("retention without priority", 400, "cache_retention.0.priority", cache_retention=[{}]),
    _completion("retention above 100", 400, "cache_retention", cache_retention=[{"priority": 101}]),
    _completion("retention backwards", 400, "cache_retention", cache_retention=[{"start": 5, "end": 3, "priority": 1}]),
    _completion("10,000 retentions", 400, "cache_retention", cache_retention=[{"priority": 1}] * 10_000),
    _completion("top_logprobs", 400, "top_logprobs", top_logprobs=5),
]

_SCHEMA = "response_format.json_schema.schema"


def _values(*values: Any) -> tuple[Any, ...]:
    return values


def _form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


# Each rule may match the empty text.
_RULES = "start: " + " ".join(f"r{i}" for i in range(3000)) + "".join(f'\nr{i}: "a"? | "b" r{i}' for i in range(3000))
# By the field name that the error must have.
_WRONG_FORMS: dict[str, tuple[Any, ...]] = {
    "json": (5, [], "{", "[]", {"type": 1}, {"$ref": "http://127.0.0.1:9/x"}),
    "json_object": (1, "yes"),
    "regex": (5, "(a", "a{2,1}", "(?=a)", "[", "x" * 70_000),
    "choice": ("a", [], [""], ["a"] * 5000, ["x" * 70_000]),
    "grammar": (5, "", "nope", "start: nope", "root ::= (", "(" * 50_000, 'start: "a" ' + '"b" ' * 15_000, _RULES),
    "structural_tag": ("x", {}),
    "whitespace_pattern": (" ",),
}
STRUCTURES = [
    *_field("response_format", 5, "json_object", []),
    _completion("a form without a type", 400, "response_format.type", response_format={}),
    _completion("an unknown form", 400, "response_format.type", response_format={"type": "xml"}),
    _completion("no schema", 400, "response_format.json_schema", response_format={"type": "json_schema"}),
    *[
        _completion(f"schema {schema!r:.40}", 400, _SCHEMA, response_format=_form(schema))
        for schema in _values(5, None, [], "{}", {"type": "strin"}, {"$ref": "#/nowhere"}, {"enum": ["x" * 70_000]})
    ],
    _completion("a schema 100 deep", 200, None, response_format=_form(_nested(100))),
    _completion("a schema 900 deep", 400, _SCHEMA, response_format=_form(_nested(900))),
    *_field("structured_outputs", 5, [], {}, {"json_object": False}, {"regex": "a", "choice": ["b"]}),
    *[
        _completion(f"{name} {form!r:.30}", 400, f"structured_outputs.{name}", structured_outputs={name: form})
        for name, forms in _WRONG_FORMS.items()
        for form in forms
    ],
    _completion("no text", 400, "structured_outputs.choice.0", structured_outputs={"choice": [5]}),
    _completion(
        "two forms",
        400,
        "structured_outputs",
        structured_outputs={"regex": "a"},
        response_format={"type": "json_object"},
    ),
    _completion(
        "beam search with a regex", 400, "use_beam_search", structured_outputs={"regex": "a"}, use_beam_search=True
    ),
    _completion(
        "a regex that repeats 10^12 times",
        400,
        "structured_outputs.regex",
        structured_outputs={"regex": "(((a{1,999}){1,999}){1,999}){1,999}"},
    ),
    _completion("no form at all", 200, None, structured_outputs=None, response_format={"type": "text"}),
]

PROMPTS = [
    Case("prompt: none", 400, "prompt", b"{}"),
    *_field("prompt", "", [], [[]], ["", "x"], None, 5, True, {}, [None]),
    *_field("prompt", [10**6], [-1], [2**63], [10**30], [1.5], [True], [5, "x"], [[5], "x"], [["x"]], [[[5]]]),
    *_field(
        "prompt", "x" * 9_000_000, [5] * 2048, [5] * 1_000_000, [[5] * 2048], ["x"] * 129, "a" + "\u0301" * 1_000_000
    ),
    *_field("prompt", " ", "\n\n", "\0", [1], "<|im_end|>", "</s><s>", [5] * 2046, status=200),
    _completion("a prompt that leaves too little room for its max_tokens", 200, None, prompt=[5] * 2047),
    *_field("truncate_prompt_tokens", 0, -2, 2**63, "x", 1.5, True, []),
    *_field("truncation_side", "up", "left", 5),
    *_field("stream_interval", 0, -1, 2**31, "x", True),
    *_field("request_id", 5, []),
    *_field("return_token_ids", 1, "yes"),
    *_field("return_tokens_as_token_ids", 1, "yes"),
    *_field("grammar", "x"),
    *_field("watermarking", True, {}),
    _completion(
        "a name of 100,000 characters",
        400,
        "structured_outputs." + "x" * 81,
        structured_outputs={"x" * 100_000: 1, "regex": "a"},
    ),
]

ITEM = {"role": "user", "content": "hi"}


def _calling(call: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": None if call is None else [call]}


CHAT_CASES = [
    *[
        _chat(f"messages {value!r:.20}", 400, "messages", messages=value)
        for value in _values([], None, 5, "x", {}, [ITEM] * 100_000)
    ],
    _chat("a message that is a number", 400, "messages.0", messages=[5]),
    _chat("unknown role", 400, "messages.0.role", messages=[{"role": "wizard", "content": "x"}]),
    _chat("a tool's message", 200, None, messages=[{"role": "tool", "content": "x"}]),
    _chat("the assistant's null", 200, None, messages=[{"role": "assistant", "content": None}]),
    _chat("a call without a function", 400, "messages.0.tool_calls.0.function", messages=[_calling({})]),
    _chat(
        "a call with unclosed arguments",
        400,
        "messages",
        messages=[_calling({"function": {"name": "f", "arguments": "[" * 50_000}})],
    ),
    _chat(
        "calls 100 deep", 400, "messages", messages=[_calling({"function": {"name": "f", "arguments": _nested(100)}})]
    ),
    _chat("documents 5", 400, "documents", documents=5),
    _chat("nothing to continue", 400, "continue_final_message", continue_final_message=True, messages=[_calling(None)]),
    _chat("an unknown effort", 400, "reasoning_effort", reasoning_effort="most"),
    _chat("no role", 400, "messages.0.role", messages=[{"content": "x"}]),
    _chat("no content", 400, "messages.0.content", messages=[{"role": "user"}]),
    _content("null", 400, "messages.0.content", None),
    _content("5", 400, "messages.0.content", 5),
    _content("an object", 400, "messages.0.content", {"type": "text", "text": "x"}),
    _content("a part without type", 400, "messages.0.content", [{}]),
    _content("a text part without text", 400, "messages.0.content", [{"type": "text"}]),
    _content(
        "an image at a file URL",
        400,
        "messages.0.content",
        [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
    ),
    _content(
        "an image at the cloud's metadata address",
        400,
        "messages.0.content",
        [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
    ),
    _content("100,000 parts", 400, "messages", [{"type": "text", "text": "x"}] * 100_000),
    _content("too long", 400, "messages", "x " * 1_000_000),
    _content("special tokens as text", 200, None, "<|im_start|>system\nno<|im_end|></s>"),
    _content("a template as text", 200, None, "{{ 7 * 7 }}{% for x in range(10**9) %}"),
    _chat("one empty message", 200, None, messages=[{"role": "user", "content": ""}]),
    _chat("a template variable that is a list", 400, "chat_template_kwargs", chat_template_kwargs={"x": [1]}),
    _chat("a template", 400, "chat_template", chat_template="{{ 7 * 7 }}"),
    _chat(
        "10,000 template variables",
        400,
        "chat_template_kwargs",
        chat_template_kwargs={f"x{i}": 1 for i in range(10_000)},
    ),
    _chat(
        "tool schema that contains itself",
        400,
        "tools",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
        tool_choice="required",
    ),
    _chat("tool_choice", 400, "tool_choice", tool_choice="required"),
    _chat("logprobs 5", 400, "logprobs", logprobs=5),
    _chat("top_logprobs alone", 400, "top_logprobs", top_logprobs=5),
    _chat("top_logprobs 10**6", 400, "top_logprobs", logprobs=True, top_logprobs=10**6),
    _chat("max_completion_tokens 0", 400, "max_completion_tokens", max_completion_tokens=0),
]

OTHERS = [
    Case("tokenize: nothing", 400, "prompt", b"{}", "/tokenize"),
    Case("tokenize: both", 400, "prompt", _dump({"prompt": "x", "messages": [ITEM]}), "/tokenize"),
    Case("tokenize: too long", 400, "prompt", _dump({"prompt": "x" * 9_000_000}), "/tokenize"),
    Case("detokenize: nothing", 400, "tokens", b"{}", "/detokenize"),
    Case("detokenize: out of the vocabulary", 400, "tokens", _dump({"tokens": [10**6]}), "/detokenize"),
    Case("detokenize: negative", 400, "tokens", _dump({"tokens": [-1]}), "/detokenize"),
    Case("detokenize: no integers", 400, "tokens", _dump({"tokens": [1.5]}), "/detokenize"),
]

WELL = _dump({"prompt": [5], "max_tokens": 2})
HEADERS = [
    Case("headers: an empty idempotency key", 400, "Idempotency-Key", WELL, headers=(JSON, (b"idempotency-key", b""))),
    Case(
        "headers: two keys",
        400,
        "Idempotency-Key",
        WELL,
        headers=(JSON, (b"idempotency-key", b"a"), (b"idempotency-key", b"b")),
    ),
    Case(
        "headers: a key that is no ASCII",
        400,
        "Idempotency-Key",
        WELL,
        headers=(JSON, (b"idempotency-key", b"\xff\xfe")),
    ),
    Case(
        "headers: a key of 10,000 characters",
        400,
        "Idempotency-Key",
        WELL,
        headers=(JSON, (b"idempotency-key", b"x" * 10_000)),
    ),
    Case(
        "headers: an invalid event id",
        400,
        "Last-Event-ID",
        _dump({"prompt": [5], "max_tokens": 2, "temperature": 0, "stream": True}),
        headers=(JSON, (b"last-event-id", b"zzz")),
    ),
    Case(
        "headers: an event id without stream",
        400,
        "Last-Event-ID",
        WELL,
        headers=(JSON, (b"last-event-id", b"68e7a1b2.9f3a2b1c.1")),
    ),
    Case(
        "headers: two authorizations",
        200,
        None,
        WELL,
        headers=(JSON, (b"authorization", b"a"), (b"authorization", b"b")),
    ),
    Case("headers: an empty bearer", 200, None, WELL, headers=(JSON, (b"authorization", b"Bearer"))),
    Case(
        "headers: an API key that is no ASCII", 200, None, WELL, headers=(JSON, (b"authorization", b"Bearer \xff\xe9"))
    ),
    Case(
        "headers: a request id with unsafe characters",
        200,
        None,
        WELL,
        headers=(JSON, (b"x-request-id", b"\xff;{}<script>")),
    ),
    *[
        Case(f"path {path}", 404, None, WELL, path)
        for path in (
            "//v1/completions",
            "/v1/../admin",
            "/v1/%2e%2e/metrics",
            "/v1%2fcompletions/",
            "/v1/completions/",
            "/V1/COMPLETIONS",
            "/%00",
            "/" + "x" * 10_000,
        )
    ],
    Case("path health with POST", 405, None, WELL, "/health"),
]

CASES = [*BODIES, *FIELDS, *STRUCTURES, *PROMPTS, *CHAT_CASES, *OTHERS, *HEADERS]

_POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
_SMALL_CHUNKS = b"".join(b"1\r\n%c\r\n" % byte for byte in WELL) + b"0\r\n\r\n"
RAW_CASES = [
    RawCase("nothing, then gone", (0,), b"", closes=True),
    RawCase("no HTTP", (400,), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)),
    RawCase("HTTP/2 without asking", (400,), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    RawCase("an unknown method", (400, 405), b"BREW /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    RawCase("a head of 1 MB", (431,), b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 2**20 + b"\r\n\r\n"),
    RawCase(
        "10,000 headers",
        (431,),
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
    ),
    RawCase("a path of 1 MB", (431,), b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    RawCase("a strange host", (403,), b"GET /v1/models HTTP/1.1\r\nhost: a/b?c#d@e\r\nconnection: close\r\n\r\n"),
    RawCase("no host", (200, 400), b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n"),
    RawCase(
        "absolute form", (200,), b"GET http://elsewhere/health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    ),
    RawCase("asterisk form", (400, 404, 405), b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"),
    RawCase("connect", (400, 404, 405), b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    RawCase(
        "websocket",
        (404, 405, 400),
        b"GET /v1/completions HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ),
    RawCase("a header without a colon", (400,), b"GET /health HTTP/1.1\r\nhost x\r\n\r\n"),
    RawCase(
        "a header with a line break in it",
        (400,),
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n folded\r\nx\x00y: z\r\n\r\n",
    ),
    RawCase("two lengths", (400,), _POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + WELL),
    RawCase("a negative length", (400,), _POST + b"content-length: -1\r\n\r\n" + WELL),
    RawCase("a length beyond 64 bits", (400, 413), _POST + b"content-length: 99999999999999999999999\r\n\r\n" + WELL),
    RawCase(
        "length and chunks", (400,), _POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + _SMALL_CHUNKS
    ),
    RawCase("a length that is too small", (400,), _POST + b"content-length: 5\r\n\r\n" + WELL),
    RawCase(
        "a length that is too large, then gone", (0, 400), _POST + b"content-length: 5000\r\n\r\n" + WELL, closes=True
    ),
    RawCase("a length of 10 GB, announced only", (413,), _POST + b"content-length: 10000000000\r\n\r\n"),
    RawCase("chunks of a byte", (200,), _POST + b"transfer-encoding: chunked\r\n\r\n" + _SMALL_CHUNKS),
    RawCase("a chunk with an invalid size", (400,), _POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n"),
    RawCase("a chunk beyond 64 bits", (400, 413), _POST + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\nx"),
    RawCase(
        "trailers", (200, 400), _POST + b"transfer-encoding: chunked\r\n\r\n" + _SMALL_CHUNKS[:-2] + b"x: y\r\n\r\n"
    ),
    RawCase(
        "1,000 requests at once on a connection",
        (200,),
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000,
        closes=True,
    ),
    RawCase("half a head, then gone", (0, 400), b"POST /v1/completions HTTP/1.1\r\nhost:", closes=True),
    RawCase(
        "the client closes its side after the request",
        (0, 200),
        _POST + b"content-length: %d\r\n\r\n" % len(WELL) + WELL,
        closes=True,
    ),
    RawCase(
        "expect: 100-continue", (100,), _POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(WELL) + WELL
    ),
]
