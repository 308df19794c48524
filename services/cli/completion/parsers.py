"""The parsers of all commands, below one parser for `paceline`."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import shtab

from scheduler_svc.policies.presets import PRESETS
from services.cli.arguments import Parser
from services.cli.main import MODULES, SERVICES
from services.runtime.settings import settings_parser

# What a flag's value completes to, by the flag's metavar. The metavar of a setting is its type, such as Path.
_COMPLETED = {"FILE": shtab.FILE, "Path": shtab.FILE, "DIR": shtab.DIRECTORY}
# Flags with folders, which are settings and therefore have another metavar.
_FOLDERS = ("--model", "--tls-dir")


def all_parsers() -> argparse.ArgumentParser:
    """The parser of `paceline`, with those of its commands. Only for completion: `main` picks a command without it."""
    root = Parser(prog="paceline", description="LLM inference server")
    commands = {name: importlib.import_module(module).parser() for name, module in MODULES.items()}
    worker = _service_parser("worker", "paceline worker")
    worker.add_argument("--server", metavar="NAME")
    commands["worker"] = worker
    serve = Parser(prog="paceline serve", description="start one service: cache, scheduler, worker or gateway")
    _add(serve, {name: _service_parser(name, f"paceline serve {name}") for name in SERVICES})
    commands["serve"] = serve
    commands["version"] = Parser(prog="paceline version", description="print the version", add_help=False)
    _add(root, commands)
    _complete_values(root)
    return root


def _service_parser(service: str, prog: str) -> argparse.ArgumentParser:
    module, name, _ = SERVICES[service]
    return settings_parser(getattr(importlib.import_module(module), name), prog=prog)


def _add(parser: argparse.ArgumentParser, commands: dict[str, argparse.ArgumentParser]) -> None:
    """Add existing parsers to this one as its subcommands."""
    made: Any = lambda prog, **_: commands[prog.rpartition(" ")[2]]  # noqa: E731
    group = parser.add_subparsers(parser_class=made)
    for name, command in commands.items():
        command.description = _summary(command)
        group.add_parser(name, help=command.description)


def _summary(parser: argparse.ArgumentParser) -> str:
    """The first sentence of the description, without the name of the command."""
    text = " ".join((parser.description or "").split())
    return text.removeprefix(f"`{parser.prog}`: ").partition(". ")[0].rstrip(".")


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Tell shtab which values the arguments take, here and in the commands below."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_values(command)
        elif action.dest == "preset":
            action.choices = sorted(PRESETS)
        elif action.choices is None and (metavar := str(action.metavar)).startswith("{"):
            action.choices = metavar.strip("{}").split(",")  # a setting's metavar lists its values
        elif set(_FOLDERS) & set(action.option_strings):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif (complete := _COMPLETED.get(metavar)) is not None:
            action.complete = complete  # type: ignore[attr-defined]
