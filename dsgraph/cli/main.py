"""`dsgraph`: the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dsgraph.nearest import nearest

from . import bisect, collectives, diff, doctor, dot, explain, ls, memory, passes, ranks, run, show
from .command import Command, CommandError

COMMANDS: tuple[Command, ...] = (
    run.COMMAND,
    ls.COMMAND,
    show.COMMAND,
    diff.COMMAND,
    explain.COMMAND,
    collectives.COMMAND,
    memory.COMMAND,
    ranks.COMMAND,
    dot.COMMAND,
    passes.COMMAND,
    bisect.COMMAND,
    doctor.COMMAND,
)

_DESCRIPTION = "Shows what dsgraph made of a model: every graph, before and after every pass, on every rank."

_EPILOG = """\
exit codes: 0 done; 1 a difference or a failure was found; 2 bad input; 130 interrupted.
`dsgraph COMMAND --help` tells more; --json prints any answer as JSON."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    try:
        code = _answer(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except CommandError as error:
        print(f"dsgraph: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `dsgraph show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _answer(arguments: Sequence[str]) -> int:
    try:
        parsed = _parse(arguments)
    except SystemExit:  # argparse has printed its help
        return 0
    command: Command = parsed.command
    answer = command.run(parsed)
    print(json.dumps(answer.data, indent=1) if parsed.json else answer.text)
    return answer.code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    known = {command.name: command for command in COMMANDS}
    name = arguments[0] if arguments else ""
    if name and not name.startswith("-") and name not in known:
        raise CommandError(f"unknown command {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    # Split here, because argparse has treated `--` in other ways from version to version of Python.
    takes_rest = name in known and known[name].takes_rest
    end = arguments.index("--") if takes_rest and "--" in arguments else len(arguments)
    parsed, unknown = build_parser().parse_known_args(arguments[:end])
    if unknown:
        hint = "the script's own arguments go behind ` -- `" if takes_rest else f"see dsgraph {name} --help"
        raise CommandError(f"unrecognized arguments: {' '.join(unknown)} ({hint})")
    parsed.rest = list(arguments[end + 1 :])
    return parsed


def _listing() -> str:
    return "\n".join(f"  {command.name:<12} {command.help}" for command in COMMANDS)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="dsgraph",
        usage="dsgraph COMMAND ...",
        description=f"{_DESCRIPTION}\n\n{_listing()}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parsers = parser.add_subparsers(metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    for command in COMMANDS:
        sub = parsers.add_parser(
            command.name,
            description=command.description,
            allow_abbrev=False,
            prog=f"dsgraph {command.name}",
        )
        sub.add_argument("--json", action="store_true", help="print JSON")
        command.configure(sub)
        sub.set_defaults(command=command)
    return parser
