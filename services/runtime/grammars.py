"""How much a grammar may take of those who read it (gateways) and of those who keep a model to it (workers)."""

from __future__ import annotations

from llguidance import LLParserLimits

# A worker compiles in the thread that runs the model, while all other sequences wait. With these limits what is legal
# takes some 15 ms to compile (a JSON Schema with 400 optional properties) and 2 ms for a token, the worst that was
# found (3,000 rules that may all be empty) is refused after 30; with llguidance's own it takes 0.8 s.
# States of the lexer take 0.5 kB each. A string of limited length takes some ten for each token that it gets, and one
# for each byte to read it again: when they are used up, the worker begins anew with what there is of the text.
LIMITS = LLParserLimits(max_grammar_size=10_000, step_max_items=10_000, max_lexer_states=50_000, verbose_errors=False)
_SHOWN_CHARS = 300


def one_line(mistake: str) -> str:
    """What llguidance says of a grammar; it may quote all of it."""
    text = " ".join(mistake.split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
