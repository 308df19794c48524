"""`paceline policy`: shows and changes the policies of a running scheduler."""

from __future__ import annotations

import argparse
import json

from paceline.v1.admin_pb2 import GetPolicyRequest, PolicyChoice, SetPolicyRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from services.cli.arguments import Parser, console, plain
from services.cli.calls import call
from services.cli.servers import add_flags

PROG = "paceline policy"
KINDS = ("order", "capacity", "batch", "preemption", "placement")
TIMEOUT_S = 10.0


def parser() -> Parser:
    top = Parser(prog=PROG, description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    get = commands.add_parser("get", help="show the current policies, and all available ones")
    change = commands.add_parser("set", help="change to a preset, other policies or options; no request is dropped")
    change.add_argument("preset", nargs="?", default="", help="a preset; without one, the current policies are changed")
    for kind in KINDS:
        change.add_argument(f"--{kind}", default="", help="a policy's name; `get` lists all of them")
    change.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of a policy; the value is JSON"
    )
    for command in (get, change):
        add_flags(command, "scheduler")
    return top


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    command = _show if arguments.command == "get" else _change
    return call(PROG, arguments, "scheduler", lambda channel: command(AdminServiceStub(channel), arguments))


def _change(stub: AdminServiceStub, arguments: argparse.Namespace) -> None:
    answer = stub.SetPolicy(SetPolicyRequest(choice=_choice(arguments)), timeout=TIMEOUT_S)
    console().print(f"in force from the next step on: {_describe(answer.choice)}", soft_wrap=True)


def _choice(arguments: argparse.Namespace) -> PolicyChoice:
    """The policies and options that the arguments name. Raises ValueError."""
    if not (arguments.preset or arguments.option or any(getattr(arguments, kind) for kind in KINDS)):
        raise ValueError("give a preset, a policy or an option")
    options = {}
    for option in arguments.option:
        name, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--option {option}: NAME=VALUE is needed")
        try:
            json.loads(value)
        except ValueError:
            value = json.dumps(value)  # a plain word is a string
        options[name] = value
    return PolicyChoice(preset=arguments.preset, options=options, **{kind: getattr(arguments, kind) for kind in KINDS})


def _show(stub: AdminServiceStub, _: argparse.Namespace) -> None:
    answer = stub.GetPolicy(GetPolicyRequest(), timeout=TIMEOUT_S)
    out = console()
    out.print(f"in force    {_describe(answer.choice)}", soft_wrap=True)
    if answer.failed_order:
        default = f"the default one, {answer.fallback.order}," if answer.fallback.order else "the default one"
        out.print(f"failed      order {plain(answer.failed_order)}: {default} replaces it", soft_wrap=True)
    for failure in answer.failures:
        policy = f"{failure.kind} {failure.policy}" if failure.kind else "a policy"
        times = f"{failure.count} times in {answer.num_steps} steps"
        out.print(f"failed      {plain(policy)}: {times}, last with {plain(failure.last_error)}", soft_wrap=True)
    if answer.failures:
        out.print(f"instead     {_describe(answer.fallback)} decided those steps", soft_wrap=True)
    for title, known in (
        ("presets", answer.presets),
        ("order", answer.orders),
        ("capacity", answer.capacities),
        ("batch", answer.batches),
        ("preemption", answer.preemptions),
        ("placement", answer.placements),
    ):
        out.print(f"{title:11} {', '.join(known)}", soft_wrap=True)


def _describe(choice: PolicyChoice) -> str:
    parts = [f"{kind} {getattr(choice, kind)}" for kind in KINDS]
    parts += [f"{name}={value}" for name, value in sorted(choice.options.items())]
    return plain(f"{choice.preset or 'no preset'}: " + ", ".join(parts))
