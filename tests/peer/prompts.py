"""The prompts of a scenario. The drivers import it from their own folder: their environments do not have Paceline."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def prompts(scenario: dict[str, Any]) -> Iterator[list[int]]:
    """The prompts by the rules of docs/scenarios.md: given, or generated with the first tokens shared in a family."""
    ids = itertools.count(1)
    families: dict[str, list[int]] = {}
    for request in scenario["requests"]:
        if "prompt" in request:
            yield request["prompt"]
            ids = itertools.count(max(next(ids), max(request["prompt"]) + 1))
            continue
        prefix = request.get("prefix") or {"family": "", "len": 0}
        family = families.setdefault(prefix["family"], [])
        family += itertools.islice(ids, max(0, prefix["len"] - len(family)))
        yield [*family[: prefix["len"]], *itertools.islice(ids, request["prompt_len"] - prefix["len"])]
