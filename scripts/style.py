"""The project's own small lint: `python scripts/style.py [--max KIND=N]...`.

Kinds of findings:
  people      a word for people (see PEOPLE) in a .py, .md or .proto file, where requests, workers and blocks are things
  test        a test name that does not begin with the thing that it tests (see SUBJECTLESS)
  class       a public top-level class with the name of a class in another module; not in tests/
  docstring   a module without a docstring
  folder      a folder with more than MAX_MODULES modules, `__init__.py` not counted; not in tests/

It prints each finding as path:line and one summary line. The exit status is 1 if a kind has more findings than its
budget. A budget is 0 unless --max gives another number. With --max, CI can allow the findings that exist today, and
fewer later.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KINDS = ("people", "test", "class", "docstring", "folder")
# An underscore ends a word, so that the words of an identifier are found, too.
PEOPLE = re.compile(r"(?<![^\W_])(who|whom|whose|whoever|(?:some|no|every|any)bodys?)(?![^\W_])", re.IGNORECASE)
# pytest's report shows a test's name without the tests around it, so the reader cannot tell what a pronoun or a
# conjunction refers to. `of` puts the subject last.
SUBJECTLESS = re.compile(r"test_(also|and|it|its|nor|of|so|their|they|those|what|whatever)_")
# A line about people ends with this marker (in Markdown as a comment: <!-- style: person -->).
MARKER = "style: person"
# (file, phrase): lines with the phrase in this file are allowed. They are about people, or the word is data.
ALLOWED = (("scripts/style.py", "PEOPLE = "), ("tests/unit/scripts/test_style.py", ""), ("demo/smalltalk.py", "ho "))
MAX_MODULES = 14
OTHERS = "protos/paceline/third_party/"  # contracts of other systems, in their words
GENERATED = re.compile(r"protos/.*_pb2(_grpc)?\.py")
HISTORY = ("CHANGELOG.md", "docs/adr/")  # texts about the past
TESTS = "tests/"


class Finding(NamedTuple):
    """One violation. `line` counts from 1."""

    kind: str
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.message}"


def tracked(root: Path) -> list[str]:
    """The .py, .md and .proto files that git tracks, without generated code."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "*.py", "*.md", "*.proto"], cwd=root, text=True)
    return [path for path in listed.split("\0") if path and not GENERATED.fullmatch(path) and (root / path).is_file()]


def people(path: str, text: str) -> Iterator[Finding]:
    """Words for people."""
    if path.startswith(HISTORY) or (path.startswith(OTHERS) and path.endswith(".proto")):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if MARKER in line or any(path == allowed and phrase in line for allowed, phrase in ALLOWED):
            continue
        for match in PEOPLE.finditer(line):
            yield Finding("people", path, number, f"`{match[0]}` is for people")


def subjectless(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Test names without a subject."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (found := SUBJECTLESS.match(node.name)):
            yield Finding("test", path, node.lineno, f"{node.name} begins with `{found[1]}`; name the thing first")


def classes(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """Public top-level classes of one name, in modules outside the tests."""
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not path.startswith(TESTS):
                found[node.name].append((path, node.lineno))
    for name, places in found.items():
        for path, line in places[1:]:
            yield Finding("class", path, line, f"{name} is also the name of a class in {places[0][0]}")


def folders(paths: list[str]) -> Iterator[Finding]:
    """Folders with too many modules, outside the tests."""
    counts = Counter(str(Path(path).parent) for path in paths if not path.startswith(TESTS))
    for folder, count in counts.items():
        if count > MAX_MODULES:
            yield Finding("folder", folder, 1, f"{count} modules, at most {MAX_MODULES}")


def check(root: Path) -> list[Finding]:
    """All findings in a working tree."""
    texts = {path: (root / path).read_text("utf-8") for path in tracked(root)}
    trees = {path: ast.parse(text, path) for path, text in texts.items() if path.endswith(".py")}
    findings = [finding for path, text in texts.items() for finding in people(path, text)]
    findings += [
        finding for path, tree in trees.items() if path.startswith(TESTS) for finding in subjectless(path, tree)
    ]
    bare = [path for path, tree in trees.items() if not ast.get_docstring(tree)]
    findings += [Finding("docstring", path, 1, "no docstring") for path in bare]
    return [*findings, *classes(trees), *folders([path for path in trees if not path.endswith("__init__.py")])]


def budget(text: str) -> tuple[str, int]:
    """KIND=N."""
    kind, _, number = text.partition("=")
    if kind not in KINDS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"expected KIND=N with KIND one of {', '.join(KINDS)}")
    return kind, int(number)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max", action="append", type=budget, default=[], metavar="KIND=N")
    budgets = dict.fromkeys(KINDS, 0) | dict(parser.parse_args(argv).max)
    findings = check(Path(__file__).resolve().parent.parent)
    print(*findings, sep="\n", end="\n" if findings else "")
    counts = Counter(finding.kind for finding in findings)
    print("style:", ", ".join(f"{kind} {counts[kind]} (at most {budgets[kind]})" for kind in KINDS))
    return int(any(counts[kind] > budgets[kind] for kind in KINDS))


if __name__ == "__main__":
    sys.exit(main())
