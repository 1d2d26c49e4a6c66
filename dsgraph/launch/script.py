"""Runs a Python script in one process or on several ranks, and leaves no process running."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from dsgraph.utils.errors import LaunchError

from .processes import run_to_end

OF_RANKS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}
"""Environment variables that torchrun sets for a rank. They are not passed on from the process of `dsgraph` itself."""


@dataclass(frozen=True)
class Script:
    """A script to run.

    Attributes:
        arguments: The arguments of `python`: the path, or "-m" and the module.
        root: A folder that must be importable; None for no particular one.
    """

    arguments: tuple[str, ...]
    root: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the script and the number of ranks."""
    add_script_arguments(parser)
    parser.add_argument(
        "--nproc", type=rank_count, default=1, metavar="N", help="ranks to start on this machine (default: 1)"
    )


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the script."""
    parser.usage = f"{parser.prog} [options] (SCRIPT | -m MODULE) [-- ARGUMENTS]"
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="path of a Python script")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module to run, as python -m does")


def rank_count(text: str) -> int:
    """Return the number in an argument `--nproc`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; it takes a whole number above 0")
    return int(text)


def find_script(path: str | None, module: str | None) -> Script:
    """Return the script to run.

    A script in a package that uses relative imports is run as a module of that package, because Python cannot run it
    otherwise.

    Raises:
        LaunchError: There is no such script or module, both are given, or neither.
    """
    if (path is None) == (module is None):
        raise LaunchError("give one script to run: a path, or -m and a module")
    if module is not None:
        _check_module(module)
        return Script(("-m", module))
    assert path is not None
    file = Path(path)
    if not file.is_file():
        raise LaunchError(f"{path} is {'a folder' if file.is_dir() else 'not a file'}; give the path of a script")
    folder = file.resolve().parent
    names = [file.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    if len(names) == 1:
        return Script((path,))
    if _imports_relatively(file):
        return Script(("-m", ".".join(names)), folder)
    return Script((path,), folder)


def run_script(
    script: Script,
    arguments: Sequence[str],
    *,
    nproc: int,
    environment: Mapping[str, str],
    quiet: bool = False,
    runner: Sequence[str] = (),
) -> int:
    """Run a script to its end, pass its output through, and return its exit code.

    Args:
        script: The script.
        arguments: Its arguments.
        nproc: Number of ranks. A single one is started without torchrun, and may form a process group all the same.
        environment: Variables to set besides those of this process.
        quiet: Write its output to stderr, because stdout is for something else.
        runner: Arguments of `python` before a single rank's script: "-m", a module that runs it, its arguments.
    """
    if nproc > 1:
        return run_under_torchrun(
            script, arguments, nproc=nproc, options=["--standalone"], environment=environment, quiet=quiet
        )
    command = [sys.executable, "-u", *runner, *script.arguments, *arguments]
    return run_to_end(command, {**_inherited(script), **_alone(), **environment}, quiet=quiet)


def run_under_torchrun(
    script: Script,
    arguments: Sequence[str],
    *,
    nproc: int,
    options: Sequence[str],
    environment: Mapping[str, str],
    quiet: bool = False,
    stdin: int | None = None,
) -> int:
    """Run this machine's ranks of a script under torchrun, and return the exit code of the one that failed first.

    Args:
        script: The script.
        arguments: Its arguments.
        nproc: Number of ranks.
        options: Options of torchrun, by which the ranks find each other.
        environment: Variables to set besides those of this process.
        quiet: Write its output to stderr, because stdout is for something else.
        stdin: As for `subprocess`; None for that of this process.
    """
    command = [sys.executable, "-u", "-m", "dsgraph.launch.torchrun", str(nproc), *options, "--"]
    variables = _inherited(script)
    variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    return run_to_end([*command, *script.arguments, *arguments], {**variables, **environment}, quiet=quiet, stdin=stdin)


def _inherited(script: Script) -> dict[str, str]:
    """Return the environment of this process, without the variables that make it a rank itself."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in OF_RANKS and not name.startswith("TORCHELASTIC_")
    }
    if script.root is not None:
        known = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
        variables["PYTHONPATH"] = os.pathsep.join([str(script.root), *known])
    return variables


def _check_module(module: str) -> None:
    """Find a module without importing anything of it, because its package may do anything when it is imported."""
    first, *rest = module.split(".")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # as `python -m` does
    try:
        spec = importlib.util.find_spec(first) if first else None
        for name in rest:
            spec = _inside(spec, name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _inside(spec, "__main__")
    except (ImportError, ValueError):
        spec = None
    finally:
        if here in sys.path:
            sys.path.remove(here)
    if spec is None:
        raise LaunchError(f"there is no module {module!r} that Python could run")


def _inside(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    if package is None or package.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(f"{package.name}.{name}", package.submodule_search_locations)


def _imports_relatively(file: Path) -> bool:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return False  # Python will say what is wrong with it
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(tree))


def _alone() -> dict[str, str]:
    """Return the environment variables of a group of one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
