"""`dsgraph run`: run a script with dumping on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dsgraph.launch.processes import describe_exit
from dsgraph.launch.script import add_arguments, find_script, run_script
from dsgraph.tools.cli.command import Answer, Command, CommandError, make_folder
from dsgraph.tools.cli.inspect.ls import list_dump
from dsgraph.tools.dumping.contents import rank_folders, remove_compiles, stranger

_DESCRIPTION = """\
Run a Python script on one or several ranks, and write every graph before and after every pass to a folder. Then print
the output of `dsgraph ls`. Use -m for a script in a package that uses relative imports.
Exit code 1: the script failed, or it compiled nothing with dsgraph."""


def _configure(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument(
        "--dump", default="dsgraph-dump", metavar="DIR", help="folder of the dump (default: dsgraph-dump)"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete an older dump in that folder")


def _run(arguments: argparse.Namespace) -> Answer:
    script = find_script(arguments.script, arguments.module)
    folder = Path(arguments.dump)
    _make_room(folder, overwrite=arguments.overwrite)
    try:
        code = run_script(
            script,
            arguments.rest,
            nproc=arguments.nproc,
            environment={"DSGRAPH_DUMP": str(folder.absolute())},
            quiet=arguments.json,
        )
    except KeyboardInterrupt:
        if any(folder.glob("rank*/compile*")):
            print(f"stopped; the incomplete dump: dsgraph ls {folder}", file=sys.stderr)
        raise
    lines = []
    data = {"script_exit_code": code, "dump": str(folder), "listing": None}
    if any(folder.glob("rank*/compile*")):
        listing = list_dump(folder)
        data["listing"] = listing.data
        lines.append(listing.text)
    else:
        lines.append(
            f"{folder} holds no graph: the script has compiled nothing with backend='dsgraph', or sets the option "
            "'dump' to another folder"
        )
    if code != 0:
        lines.append(f"the script failed ({describe_exit(code)})")
    return Answer("\n".join(lines), data, code=0 if code == 0 and data["listing"] is not None else 1)


def _make_room(folder: Path, *, overwrite: bool) -> None:
    """Check that the folder is empty or does not exist.

    Raises:
        CommandError: It contains an older dump that may not be overwritten, or other files, which never may.
    """
    make_folder("--dump", folder)
    if not any(folder.iterdir()):
        return
    strange = stranger(folder)
    if strange is not None:
        raise CommandError(f"{folder} holds {strange}, which is not part of a dump; give --dump another folder")
    if not overwrite:
        raise CommandError(f"{folder} holds an older dump; give --overwrite to replace it, or --dump another folder")
    try:
        for _, rank in list(rank_folders(folder)):
            remove_compiles(rank)
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be deleted ({error.strerror}); give --dump another folder"
        ) from None


COMMAND = Command("run", "run a script with dumping enabled, then list the dump", _DESCRIPTION, _configure, _run, True)
