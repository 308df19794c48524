"""Splits a chat model's text into reasoning, content and tool calls, and writes grammars that force tool calls.

No sockets, no clock. Parsers take text piece by piece. What they have returned depends only on the text so far, and
never on how it was split: a stream that resumes at another gateway gives the same deltas. May import `grammars`.
"""
