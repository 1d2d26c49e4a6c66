"""What a command is, and what it answers with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class CommandError(Exception):
    """Bad input. `main` prints the message as one line on stderr and exits with 2."""


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes:
        text: For people; what is printed without `--json`.
        data: The same for programs; what `--json` prints. Made of dicts, lists, strings, numbers, booleans and None.
            None itself: there is nothing to print, as on ranks other than the first.
        code: Exit code: 0, or 1 when the command looked for a difference and found one.
    """

    text: str
    data: Any
    code: int = 0


@dataclass(frozen=True)
class Command:
    """One command of `dsgraph`.

    Attributes:
        name: As typed.
        help: What it does, in a few words, for the list of commands.
        description: The paragraph above its options in `dsgraph NAME --help`; exit codes besides 0 and 2 belong here.
        configure: Adds its arguments to a parser; `--json` is there already.
        run: Does it. Raises CommandError for bad input. Imports torch only if it must, and only here: reading a dump
            does not need it, and loading it takes longer than the rest.
        takes_rest: Whether what stands behind `--` is for a script: `run` finds it as `rest`, a list.
        script_ends_options: Whether the first argument that is no option is a script, and all behind it is for that:
            `run` finds it as `rest`.
    """

    name: str
    help: str
    description: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Answer]
    takes_rest: bool = False
    script_ends_options: bool = False
