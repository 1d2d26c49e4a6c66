"""Writes `docs/reference/cli.md` from the help of the commands: `python -m dsgraph.tools.cli.document FILE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from .main import COMMANDS, build_parser, load, parser_of

_HEAD = """\
# The command line

`python -m dsgraph.tools.cli.document docs/reference/cli.md` writes this page from `dsgraph COMMAND --help`.
`python -m dsgraph` is the same as `dsgraph`.
"""


def main() -> None:
    """Write the page to the path given."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dsgraph.tools.cli.document PATH")
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the whole page, the same under every version of Python: argparse's own layout is not."""
    commands = [load(name) for name in COMMANDS]
    rows = [f"| [`dsgraph {command.name}`](#dsgraph-{command.name}) | {_cell(command.help)} |" for command in commands]
    parts = [_HEAD, "\n".join(["| command | does |", "|---|---|", *rows]) + "\n", f"{build_parser().epilog or ''}\n"]
    parts += ["\n".join(_section(parser_of(command))) for command in commands]
    return "\n".join(parts)


def _section(parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = [action for action in parser._actions if action.help is not argparse.SUPPRESS and action.dest != "help"]
    positional = [_spelling(action) for action in actions if not action.option_strings]
    yield f"## {parser.prog}\n"
    yield f"    {parser.usage or ' '.join([parser.prog, '[options]', *positional])}\n"
    yield f"{(parser.description or '').strip()}\n"
    yield "| argument | |"
    yield "|---|---|"
    for action in actions:
        expanded = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield f"| `{_cell(_spelling(action))}` | {_cell(expanded)} |"
    yield ""


def _spelling(action: argparse.Action) -> str:
    """Return an argument as it is typed: `--nproc N`, `[NAME]`."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else ""
    value = str(action.metavar or choices or action.dest.upper())
    if action.option_strings:
        return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")
    return {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ..."}.get(str(action.nargs), value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
