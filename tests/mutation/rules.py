"""Finds where a mistake can be planted in a module, by rule, and plants it.

A mutation is named by its function, its rule, and the code before and after, so that its name outlives edits of other
lines. Code that only describes (error texts, `__repr__`, docstrings, annotations, assertions) is left alone.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Rule = Literal["off-by-one", "dropped-field", "dropped-call", "skipped-branch", "dropped-condition", "swapped-argument"]

OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
# Functions with a result that does not depend on the order of their arguments.
SYMMETRIC = ("min", "max", "minimum", "maximum", "isinstance")
# Functions that only check or describe.
DESCRIBING = ("__repr__", "__str__", "check_invariants", "explain")


@dataclass(frozen=True, slots=True)
class Mutation:
    path: str  # of the module, from the repository's root
    function: str  # qualified name, "" for a module constant
    rule: Rule
    before: str
    after: str
    nth: int  # index among the module's mutations with the same text
    line: int

    @property
    def name(self) -> str:
        return f"{self.path}::{self.function} {self.rule}: {self.before} -> {self.after} #{self.nth}"

    @property
    def digest(self) -> str:
        """Orders mutations at random. The order of two mutations stays the same when others come and go, and when their
        functions move."""
        function = self.function.rpartition(".")[2]
        return hashlib.sha256(f"{function} {self.rule}: {self.before} -> {self.after}".encode()).hexdigest()


def mutations(path: Path, root: Path) -> list[Mutation]:
    """Every mutation of a module."""
    return [mutation for mutation, *_ in _all(_parsed(path), path, root)]


def plant(mutation: Mutation, root: Path) -> ast.Module | None:
    """The module as it reads with this mistake; None if it has no such place any more."""
    path = root / mutation.path
    tree = _parsed(path)
    for found, node, replacement in _all(tree, path, root):
        if found.name == mutation.name:
            planted = _Plant(node, replacement).visit(tree)
            assert isinstance(planted, ast.Module)
            return ast.fix_missing_locations(planted)
    return None


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _all(tree: ast.Module, path: Path, root: Path) -> Iterator[tuple[Mutation, ast.AST, ast.AST]]:
    """Every mutation, with the node of the tree that it replaces and the new node."""
    seen: Counter[tuple[str, ...]] = Counter()
    for site in _sites(tree):
        for rule, node, replacement in _changes(site):
            before, after = _short(node), _short(replacement)
            key = (site.function, rule, before, after)
            relative = path.relative_to(root).as_posix()
            yield Mutation(relative, *key, seen[key], site.node.lineno), node, replacement
            seen[key] += 1


@dataclass(frozen=True, slots=True)
class _Site:
    function: str
    node: ast.stmt


def _sites(tree: ast.Module) -> Iterator[_Site]:
    """Statements in which a mistake may be planted: those of functions, and constants of the module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp | ast.Tuple):
            yield _Site("", node)
    yield from _in_functions(tree.body, "")


def _in_functions(body: list[ast.stmt], prefix: str) -> Iterator[_Site]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _in_functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and node.name not in DESCRIBING:
            for statement in _statements(node.body):
                yield _Site(f"{prefix}{node.name}", statement)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.FunctionDef):
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)
        for case in getattr(node, "cases", []):
            yield from _statements(case.body)


def _changes(site: _Site) -> Iterator[tuple[Rule, ast.AST, ast.AST]]:
    """The changes of this statement, without those of the statements in it: rule, old node, new node."""
    statement = site.node
    roots: list[ast.AST] = [statement]
    match statement:
        case ast.If(test=test):
            yield "skipped-branch", test, ast.Constant(False)
            yield "skipped-branch", test, ast.Constant(True)
            roots = [test]
        case ast.While(test=test):
            roots = [test]
        case ast.For(iter=iterated):
            roots = [iterated]
        case ast.With():
            roots = []
        case ast.Match(subject=subject):
            roots = [subject]
        case _ if site.function and not site.function.endswith(("__init__", "__post_init__")):
            yield from _dropped(statement)
    for root in roots:
        for node in _expressions(root):
            # A module's constant is often a limit. With one more, the code often still works, so it is doubled, which a
            # test should notice.
            yield from _in_expression(node) if site.function else _doubled(node)


def _doubled(node: ast.expr) -> Iterator[tuple[Rule, ast.AST, ast.AST]]:
    match node:
        case ast.Constant(value=int(number) | float(number)) if not isinstance(number, bool):
            yield "off-by-one", node, ast.Constant(number * 2 + 1)


def _dropped(statement: ast.stmt) -> Iterator[tuple[Rule, ast.AST, ast.AST]]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield "dropped-call", statement, ast.Pass()
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    if isinstance(statement, ast.Assign | ast.AugAssign) and isinstance(target, ast.Attribute | ast.Subscript):
        yield "dropped-field", statement, ast.Pass()
    if (
        isinstance(statement, ast.Assign)
        and isinstance(target, ast.Tuple)
        and isinstance(statement.value, ast.Tuple)
        and any(isinstance(one, ast.Attribute) for one in target.elts)
    ):
        for i, one in enumerate(target.elts):
            if isinstance(one, ast.Attribute):
                rest = copy.deepcopy(statement)
                assert isinstance(rest.targets[0], ast.Tuple)
                assert isinstance(rest.value, ast.Tuple)
                del rest.targets[0].elts[i], rest.value.elts[i]
                yield "dropped-field", statement, rest


def _expressions(root: ast.AST) -> Iterator[ast.expr]:
    """All expressions below, without texts for people."""
    for child in ast.iter_child_nodes(root):
        if isinstance(child, ast.stmt | ast.JoinedStr):
            continue
        if isinstance(root, ast.AnnAssign) and child is root.annotation:
            continue
        if isinstance(child, ast.Call) and _is_error(child):
            continue
        yield from _expressions(child)
    if isinstance(root, ast.expr) and not isinstance(root, ast.JoinedStr):
        yield root


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_error(call: ast.Call) -> bool:
    name = _called(call)
    return name.endswith(("Error", "Rejection", "Violation")) or name in ("invalid", "cast")


def _in_expression(node: ast.expr) -> Iterator[tuple[Rule, ast.AST, ast.AST]]:
    match node:
        case ast.Compare(ops=[op], left=left, comparators=comparators) if type(op) in OPPOSITE:
            yield "off-by-one", node, ast.Compare(left, [OPPOSITE[type(op)]()], comparators)
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            yield "off-by-one", node, ast.Constant(number + 1)
        case ast.BoolOp(values=values):
            for value in values:
                rest = [other for other in values if other is not value]
                replacement = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
                yield "dropped-condition", node, replacement
        case ast.IfExp(body=body, orelse=orelse):
            yield "skipped-branch", node, orelse
            yield "skipped-branch", node, body
        case ast.Call():
            yield from _in_call(node)


def _in_call(call: ast.Call) -> Iterator[tuple[Rule, ast.AST, ast.AST]]:
    name, args, keywords = _called(call), call.args, call.keywords
    swappable = ast.Name | ast.Attribute | ast.Subscript
    for i, (one, two) in enumerate(itertools.pairwise(args)):
        if name in SYMMETRIC or not (isinstance(one, swappable) and isinstance(two, swappable)):
            continue
        if ast.dump(one) != ast.dump(two):
            swapped = [*args[:i], two, one, *args[i + 2 :]]
            yield "swapped-argument", call, ast.Call(call.func, swapped, keywords)
    if name[:1].isupper() or name in ("add", "replace"):
        for keyword in keywords:
            if keyword.arg is not None:
                kept = [other for other in keywords if other is not keyword]
                yield "dropped-field", call, ast.Call(call.func, args, kept)


class _Plant(ast.NodeTransformer):
    def __init__(self, node: ast.AST, replacement: ast.AST) -> None:
        self.node, self.replacement = node, replacement

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.node:
            return ast.copy_location(self.replacement, node)
        visited: ast.AST = super().visit(node)
        return visited


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:60]} … {hashlib.sha256(text.encode()).hexdigest()[:8]}"
