"""A command, and its answer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CommandError(Exception):
    """An error in the user's input; `main` prints its message as one line on stderr and exits with 2.

    Fix: the message names the argument and what would be accepted.
    """


@dataclass(frozen=True)
class Answer:
    """The answer of a command.

    Attributes:
        text: Human-readable text; printed without `--json`.
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
        takes_rest: True if the arguments after `--` belong to a script: `run` finds them as `rest`, a list.
        script_ends_options: True if the first argument that is no option is a script, and all later arguments belong to
            it: `run` finds them as `rest`.
    """

    name: str
    help: str
    description: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Answer]
    takes_rest: bool = False
    script_ends_options: bool = False


def make_folder(option: str, folder: Path) -> None:
    """Make the folder that is given to an option, unless it is there.

    Raises:
        CommandError: It cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{option} {folder} is a file; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{option} {folder} cannot be made ({error.strerror}); give another folder") from None
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{option} {folder} cannot be written to; give another folder")
