"""Stand-ins for packages that SGLang imports but does not use for scheduling: kernels, vision, web servers.

SGLang's scheduler module imports all of SGLang. Scheduling never calls the packages below. A stand-in module of any
name under them creates each attribute at its first use.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

ABSENT = {
    "compressed_tensors",
    "einops",
    "fastapi",
    "gguf",
    "partial_json_parser",
    "sentencepiece",
    "setproctitle",
    "torchvision",
    "truststore",
    "tvm_ffi",
    "uvicorn",
}


class Anything(type):
    """A class that makes up its attributes. Its instances take any call and any decoration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return made_up(name)


class Stub:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return made_up(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self


def made_up(name: str) -> Any:
    return Anything(name, (Stub,), {}) if name[0].isupper() else Stub()


class StubModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []  # type: ignore[misc]
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = made_up(name)
        setattr(self, name, value)
        return value


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Adds the finder after the ordinary ones, so that an installed package is used."""
    sys.meta_path.append(StubFinder())
