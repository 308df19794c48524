"""Reads command line flags in the same way for every command: a mistake is one line on stderr, and exit status 2."""

from __future__ import annotations

import argparse
import sys
import unicodedata
from typing import NoReturn

from rich.console import Console

USAGE_ERROR = 2
MAX_LINE = 600
PIPE_WIDTH = 160
# Line feed, tab, zero-width non-joiner and joiner.
_KEPT = "\n\t\u200c\u200d"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        sys.exit(usage_error(self.prog, f"{message} (see --help)"))


def usage_error(prog: str, message: str) -> int:
    """Print the message in one line, and return the exit status."""
    line = plain(" ".join(message.split()))
    print(f"{prog}: {line if len(line) <= MAX_LINE else line[:MAX_LINE] + '…'}", file=sys.stderr)
    return USAGE_ERROR


def console() -> Console:
    """Standard output, with long lines in a file or a pipe. No markup and no emoji codes, because clients wrote much of
    the text."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def readable(text: str) -> str:
    """A text from outside, of several lines, for a terminal.

    Lines, tabs, spaces of all widths and the joiners of scripts and emoji stay. Other control characters, which could
    move the cursor or reverse the text, are escaped.
    """
    return "".join(c if c in _KEPT or unicodedata.category(c) == "Zs" else plain(c) for c in text)


def plain(text: str) -> str:
    """A text from outside. Characters that control a terminal are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
