"""Structured logs: coloured lines on a terminal, one JSON object a line otherwise, always on stderr.

Every line carries the service's name and, inside a request, its id. The standard library's loggers (uvicorn, grpc,
asyncio, warnings) go through the same formatter.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import IO, Any

import orjson
import structlog
from structlog.contextvars import bind_contextvars, merge_contextvars, unbind_contextvars
from structlog.typing import EventDict, Processor, WrappedLogger

# Libraries with log lines at INFO that repeat our own, or that are of no use.
_QUIET_LOGGERS = ("asyncio", "httpcore", "httpx", "huggingface_hub", "uvicorn.access", "uvicorn.error")
_FORMATS = ("auto", "human", "json")
MAX_VALUE = 20_000  # characters; a foreign error message may have megabytes


def configure_logging(service: str, level: str, fmt: str, *, stream: IO[str] | None = None) -> None:
    """Set up logging for this process; a later call replaces the earlier one.

    `level`: a level name of the logging module, in upper or lower case. `fmt`: auto, human or json. Raises ValueError.
    """
    stream = stream if stream is not None else sys.stderr
    if fmt not in _FORMATS:
        raise ValueError(f"log format must be one of {', '.join(_FORMATS)}, not {fmt!r}")
    human = fmt == "human" or (fmt == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_processors(service), structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(human, stream)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING) if root.level > logging.DEBUG else root.level)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_processors(service),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that takes an event and key=value pairs: `log.info("worker registered", worker=3)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bind_request_id(request_id: str | None) -> None:
    """Put the request's id on every log line of the current task and the tasks it starts. None removes the id."""
    if request_id is None:
        unbind_contextvars("request_id")
    else:
        bind_contextvars(request_id=request_id)


def bind_trace_id(bound: str) -> None:
    """Put the client's trace (W3C) on every log line of the current task and the tasks it starts. An empty id removes
    it."""
    if bound:
        bind_contextvars(trace_id=bound)
    else:
        unbind_contextvars("trace_id")


def human_renderer(colors: bool) -> structlog.dev.ConsoleRenderer:
    """Renders an event as a line for people."""
    return structlog.dev.ConsoleRenderer(
        colors=colors, exception_formatter=structlog.dev.plain_traceback, pad_event_to=0, sort_keys=False
    )


def _processors(service: str) -> list[Processor]:
    def add_service(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {
            "timestamp": event.pop("timestamp"),
            "level": event.pop("level"),
            "service": event.pop("service", service),
            **event,
        }

    return [
        merge_contextvars,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        add_service,
    ]


def _renderers(human: bool, stream: IO[str]) -> list[Processor]:
    cut: list[Processor] = [structlog.processors.format_exc_info, _cut]
    if human:
        return [*cut, _shorten_timestamp, human_renderer(colors=stream.isatty() and "NO_COLOR" not in os.environ)]
    return [*cut, structlog.processors.EventRenamer("message"), structlog.processors.JSONRenderer(serializer=_to_json)]


def _shorten_timestamp(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    # 2026-01-02T03:04:05.678901Z: at a terminal the time of day is enough.
    event["timestamp"] = str(event["timestamp"])[11:23]
    return event


def _to_json(event: dict[str, Any], **_: Any) -> str:
    try:
        return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # a foreign text has half a surrogate pair
        return json.dumps(event, default=str)


def _cut(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str) and len(value) > MAX_VALUE:
            event[name] = f"{value[:MAX_VALUE]}… ({len(value)} characters)"
    return event
