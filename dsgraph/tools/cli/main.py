"""`dsgraph`: the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from dsgraph.errors import LaunchError
from dsgraph.nearest import nearest

from .command import Command, CommandError

COMMANDS = (
    *("run", "ls", "show", "diff", "explain", "collectives", "memory", "ranks", "dot"),
    *("passes", "config", "bisect", "emit", "calibrate", "doctor"),
)
"""Each in the module of its name, which is loaded when it is called: `doctor` must work where others cannot."""

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
    except (CommandError, LaunchError) as error:
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
    if answer.data is not None:
        print(json.dumps(answer.data, indent=1) if parsed.json else answer.text)
    return answer.code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    name = arguments[0] if arguments else ""
    if name and not name.startswith("-") and name not in COMMANDS:
        raise CommandError(f"unknown command {name!r}{nearest(name, COMMANDS)}; known: {', '.join(COMMANDS)}")
    if name not in COMMANDS:
        build_parser().parse_args(arguments)
        raise CommandError("no command (see dsgraph --help)")
    command = load(name)
    # Split here, because argparse has treated `--` in other ways from version to version of Python.
    end = arguments.index("--") if command.takes_rest and "--" in arguments else len(arguments)
    parsed, unknown = parser_of(command).parse_known_args(arguments[1:end])
    if unknown:
        hint = "the script's own arguments go behind ` -- `" if command.takes_rest else f"see dsgraph {name} --help"
        raise CommandError(f"unrecognized arguments: {' '.join(unknown)} ({hint})")
    parsed.command, parsed.rest = command, list(arguments[end + 1 :])
    return parsed


def load(name: str) -> Command:
    """The command of this name."""
    command: Command = import_module(f"{__package__}.{name}").COMMAND
    return command


def build_parser() -> argparse.ArgumentParser:
    """The parser of `dsgraph` without a command, which only knows how to help."""
    listing = "\n".join(f"  {command.name:<12} {command.help}" for command in map(load, COMMANDS))
    return _Parser(
        prog="dsgraph",
        usage="dsgraph COMMAND ...",
        description=f"{_DESCRIPTION}\n\n{listing}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parser_of(command: Command) -> argparse.ArgumentParser:
    """The parser of one command's arguments."""
    parser = _Parser(prog=f"dsgraph {command.name}", description=command.description, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    command.configure(parser)
    return parser
