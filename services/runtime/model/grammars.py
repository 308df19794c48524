"""Limits on what a grammar may cost the processes that use it: a gateway's trial process, and a worker.

llguidance counts its own work (fuel, items, symbols, states) and puts a matcher into an error state at a limit. The
counts are the same on every machine, so gateways and workers agree about a grammar. What llguidance does not count,
such as the automaton of `multipleOf`, is limited by the CPU time and the memory of a trial process."""

from __future__ import annotations

from llguidance import LLParserLimits

# Measured on one core with a vocabulary of 1,024 tokens: a JSON Schema with 400 optional properties compiles in 8 to
# 31 ms, with a mask of 2 ms for the first token and 0.02 ms for later ones; it needs 4,000 items a step, and rows of
# 1,607 items. With 128,000 tokens the expression `[a-z ]{1,200}` needs between 10,000 and 20,000 items a step.
# With llguidance's default fuel (1,000,000), 15,000 copies of the regular expression `x*` take 3 s and 0.9 GB; with a
# fuel of 50,000 they are refused after 13 ms. With its default fuel for a step (200,000), a mask of a large schema
# takes 17 ms, with 20,000 it takes 2 ms; ambiguous grammars take longer (docs/adr/0008).
# A lexer state takes 0.5 kB. All matchers of a grammar share the states. When their number reaches max_lexer_states,
# the worker compiles the grammar again (if that is fast) and reads the text so far.
LIMITS = LLParserLimits(
    max_grammar_size=10_000,
    max_items_in_row=2_000,
    step_max_items=20_000,
    initial_lexer_fuel=50_000,
    step_lexer_fuel=20_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
_SHOWN_CHARS = 300
_DEAD_END = "NoExtensionBias"  # llguidance's name for a text that no token can continue


SLOW_STEP_S = 0.02  # CPU time that the masks of all grammars of a step may take
SHARE_S = 0.001  # CPU time of a mask that is always allowed, however many rows there are


def one_line(mistake: str) -> str:
    """llguidance's message about a grammar, in one line. The original may quote the whole grammar."""
    text = " ".join(mistake.replace("<non-verbose/>", "").split())
    if text == _DEAD_END:
        return "no text can match it: a rule or a $ref leads only to itself, or parts contradict each other"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
