"""`dsgraph`: the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from typing import NoReturn

from dsgraph.utils.errors import LaunchError
from dsgraph.utils.nearest import nearest

from .command import Command, CommandError

COMMANDS = {
    **dict.fromkeys(("run", "launch"), "programs"),
    **dict.fromkeys(("ls", "show", "diff", "explain", "collectives", "memory", "ranks", "dot", "passes"), "inspect"),
    "config": "planning",
    **dict.fromkeys(("export", "import"), "checkpoints"),
    **dict.fromkeys(("bisect", "emit"), "programs"),
    **dict.fromkeys(("plan", "schedule", "sparse"), "planning"),
    **dict.fromkeys(("calibrate", "doctor"), "programs"),
}
"""Each command with its folder. Its module is loaded when it is called: `doctor` must work where others cannot."""

_DESCRIPTION = "Inspect, debug and plan compiled training: dumps, checkpoints, layouts and this machine."

_EPILOG = """\
exit codes: 0 done; 1 a difference or a failure was found; 2 bad input; 130 interrupted.
`dsgraph COMMAND --help` describes a command; --json prints its output as JSON."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
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
    parser = parser_of(command)
    own, rest = _split(command, parser, arguments[1:])
    parsed, unknown = parser.parse_known_args(own)
    if unknown:
        hint = "put arguments of the script after ` -- `" if command.takes_rest else f"see dsgraph {name} --help"
        raise CommandError(f"unrecognized arguments: {' '.join(unknown)} ({hint})")
    parsed.command, parsed.rest = command, list(rest)
    return parsed


def _split(
    command: Command, parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return a command's own arguments and those of its script: argparse would drop a `--` among the latter."""
    if command.takes_rest:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        return arguments[:end], arguments[end + 1 :]
    if not command.script_ends_options:
        return arguments, ()
    # An option that stands as a word of its own is followed by its value, unless it takes none.
    alone = {text: action.nargs == 0 for action in parser._actions for text in action.option_strings}
    script = 0
    while script < len(arguments) and arguments[script].startswith("-"):
        script += 1 if alone.get(arguments[script], True) else 2
    return arguments[: script + 1], arguments[script + 1 :]


def load(name: str) -> Command:
    """Return the command of this name."""
    module = f"{name}_" if iskeyword(name) else name
    command: Command = import_module(f"{__package__}.{COMMANDS[name]}.{module}").COMMAND
    return command


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `dsgraph` without a command, which only knows how to help."""
    listing = "\n".join(f"  {command.name:<12} {command.help}" for command in map(load, COMMANDS))
    parser = _Parser(
        prog="dsgraph",
        usage="dsgraph COMMAND ...",
        description=f"{_DESCRIPTION}\n\n{listing}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # the epilog says it
    return parser


def parser_of(command: Command) -> argparse.ArgumentParser:
    """Return the parser of one command's arguments."""
    parser = _Parser(prog=f"dsgraph {command.name}", description=command.description, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    command.configure(parser)
    return parser
