"""Plants mistakes in the source of functions, and finds the fences of the worker."""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpu_worker

_FLAGS = __future__.annotations.compiler_flag
WORKER = Path(gpu_worker.__file__ or "").parent
# Methods of DeviceEvent and of torch.cuda that order work or wait for it.
_FENCES = ("wait", "hold", "record", "is_passed", "synchronize")


@dataclass(frozen=True)
class Mistake:
    """A piece of a function's source, and what replaces it."""

    owner: Any  # class or module
    function: str
    line: str
    instead: str = "pass"

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        found = inspect.unwrap(getattr(self.owner, self.function))
        source = textwrap.dedent(inspect.getsource(found))
        assert source.count(self.line) == 1, f"{self.function} has not one {self.line!r} any more"
        code = compile(source.replace(self.line, self.instead), f"<{self.function}>", "exec", _FLAGS)
        made: dict[str, Any] = {}
        exec(code, sys.modules[found.__module__].__dict__, made)  # noqa: S102
        for owner in self._owners(found):
            patch.setattr(owner, self.function, made[self.function])

    def _owners(self, found: object) -> list[Any]:
        """The class, or all modules that have imported the function."""
        if inspect.isclass(self.owner):
            return [self.owner]
        modules = [module for name, module in sys.modules.items() if name.startswith("gpu_worker.")]
        return [module for module in modules if getattr(module, self.function, None) is found]

    @property
    def place(self) -> str:
        return f"{self.function}: {self.line}"


def fences() -> set[str]:
    """All fences in the worker's source, as Mistake.place has them."""
    return {place for path in WORKER.rglob("*.py") for place in _fences_of(path)}


def _fences_of(path: Path) -> Iterator[str]:
    source = path.read_text()
    if "DeviceEvent" not in source and "torch.cuda" not in source:
        return
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in _FENCES
                and (not call.args or call.func.attr == "synchronize")
            ):
                yield f"{function.name}: {ast.unparse(call)}"
