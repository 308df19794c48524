"""Maps `cache_control` to the cache's retention: which tokens of the prompt stay cached with a higher priority, and for
how long."""

from __future__ import annotations

from array import array

import numpy as np

from paceline.v1 import common_pb2
from services.gateway.anthropic.conversion import CachedPrefix, CountedChat
from services.gateway.errors import ApiError
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.jobs import CHAT, Asked
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# The default of a block is 35. Blocks with a lower priority are evicted first.
PRIORITY = 70
DURATIONS_MS = {"5m": 300_000, "1h": 3_600_000}


async def retained(
    gateway: Gateway, body: CountedChat, prompt_ids: array[int], asked: Asked
) -> list[common_pb2.RetentionRange]:
    """The ranges of the prompt that the request wants cached. Raises Gone."""
    ranges: list[common_pb2.RetentionRange] = []
    start = 0
    for prefix in body.prefixes:
        end = await _end(gateway, body, prefix, prompt_ids, asked)
        if end > start:
            duration_ms = DURATIONS_MS[prefix.ttl]
            ranges.append(common_pb2.RetentionRange(start=start, end=end, priority=PRIORITY, duration_ms=duration_ms))
            start = end
    return ranges


async def _end(gateway: Gateway, body: CountedChat, prefix: CachedPrefix, prompt_ids: array[int], asked: Asked) -> int:
    """The number of first tokens that the prompt shares with the chat that ends at the prefix. If the template ends the
    shorter chat with other text, the count stops before that text. So later requests with the same prefix begin with
    these tokens, too."""
    messages = [*body.messages[: prefix.num_whole], *prefix.rest]
    begun = body.model_copy(
        update={"messages": messages, "continue_final_message": False, "add_generation_prompt": False}
    )
    chat = begun.for_template()
    try:
        ids = await gateway.builder.encode_chat(
            chat.messages,
            CHAT,
            add_generation_prompt=False,
            variables=chat.variables,
            extras=chat.extras,
            gone=asked.gone,
        )
    except ApiError as error:  # some templates refuse the shorter chat
        _log.debug("cache_control: the whole prompt is kept", id=asked.answer_id, message=error.message)
        return len(prompt_ids)
    shortest = min(len(ids), len(prompt_ids))
    differs = np.asarray(ids[:shortest], np.int32) != np.frombuffer(prompt_ids, np.int32, shortest)
    return int(differs.argmax()) if differs.any() else shortest
