"""`paceline completion`: prints the script with which a shell completes commands and flags."""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter

import shtab
from rich.console import Console

from services.cli.arguments import Parser
from services.cli.waiting import waiting

PROG = "paceline completion"
SHELLS = ("bash", "zsh", "fish")
_INSTALL = """\
where the script goes:
  bash   paceline completion bash > ~/.local/share/bash-completion/completions/paceline
  zsh    paceline completion zsh > "${fpath[1]}/_paceline"
  fish   paceline completion fish > ~/.config/fish/completions/paceline.fish
A new shell reads it.
"""


def parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__, epilog=_INSTALL, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=SHELLS)
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    shell = parser().parse_args(argv).shell
    with waiting(Console(stderr=True), "collecting the flags of all commands"):
        from services.cli.completion.parsers import all_parsers  # it imports every command, which takes a second

        script = shtab.complete(all_parsers(), shell)
    print(script)
    return 0
