"""Why a test that passes on vLLM does not pass on Paceline: patterns of test ids, each with its reason."""

from __future__ import annotations

from fnmatch import fnmatchcase

REASONS: dict[str, str] = {}


def reason(test: str) -> str:
    """Empty if the test has to pass."""
    escaped = test.replace("[", "<").replace("]", ">")  # fnmatch reads brackets as sets
    return next((why for pattern, why in REASONS.items() if fnmatchcase(escaped, pattern)), "")
