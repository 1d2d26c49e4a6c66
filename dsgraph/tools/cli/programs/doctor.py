"""`dsgraph doctor`: the parts of dsgraph that work on this machine."""

from __future__ import annotations

import argparse
import getpass
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from dsgraph.tools.cli.command import Answer, Command
from dsgraph.tools.cli.table import table

from . import probe

_DESCRIPTION = """\
Check Python, torch, compilers, devices and packages, and run a collective on two processes. Then list the features of
dsgraph that work on this machine, those that do not, and why.
Exit code 1: something that dsgraph requires is missing or broken."""

# Longest time of the process that loads torch, and of the compiler, seconds; a few on an idle machine.
_PATIENCE, _COMPILER_PATIENCE = 60.0, 30.0
_OLDEST_PYTHON = (3, 10)

_OPTIONAL = {  # package -> where to get it
    "transformers": "pip install 'transformers>=5,<6'",
    "matplotlib": "pip install matplotlib",
    "deepspeed": "https://github.com/deepspeedai/DeepSpeed",
    "torchtitan": "https://github.com/pytorch/torchtitan",
}
_NOT_NEEDED = ("processors", "calibration", "dot", "devices", *_OPTIONAL)
_PROGRAM = """\
#include <Python.h>
#include <omp.h>
int main() { return omp_get_max_threads() < 1; }
"""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was checked.
        state: "ok", "missing", "broken", or "unknown" where it could not be checked.
        found: What was found, such as a version.
        advice: What is wrong, or where to get it.
    """

    name: str
    state: str
    found: str = ""
    advice: str = ""

    @property
    def is_ok(self) -> bool:
        """True if it can be used."""
        return self.state == "ok"

    @property
    def is_needed(self) -> bool:
        """True if dsgraph cannot work without it."""
        return self.name not in _NOT_NEEDED


@dataclass(frozen=True)
class Ability:
    """An ability of dsgraph.

    Attributes:
        name: The ability.
        lacks: What prevents it here; empty where it works.
    """

    name: str
    lacks: str


def _configure(parser: argparse.ArgumentParser) -> None:
    pass


def _run(arguments: argparse.Namespace) -> Answer:
    with ThreadPoolExecutor() as others:  # loading torch takes longest
        with_torch = others.submit(_with_torch)
        checks = [_guarded(name, check) for name, check in _CHECKS.items()]
        checks += [_guarded(name, partial(_optional, name)) for name in _OPTIONAL]
        checks += with_torch.result()
    abilities = list(_abilities({check.name: check for check in checks}))
    broken = [check.name for check in checks if check.is_needed and not check.is_ok]
    rows = [["" if check.is_ok else check.state, check.name, check.found, check.advice] for check in checks]
    works = [["no" if ability.lacks else "yes", ability.name, ability.lacks] for ability in abilities]
    end = f"dsgraph does not work here: see {', '.join(broken)}" if broken else "dsgraph works here"
    text = "\n\n".join([table(rows, ["", "check", "found", "what to do"]), table(works, ["works", "", "why not"]), end])
    data = {
        "works": not broken,
        "checks": [{**asdict(check), "needed": check.is_needed} for check in checks],
        "abilities": [asdict(ability) for ability in abilities],
    }
    return Answer(text, data, code=1 if broken else 0)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """Return the check's result, or that it failed: the other checks run in any case."""
    try:
        return check()
    except Exception as error:
        return Check(name, "broken", advice=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _python() -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info >= _OLDEST_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "broken", found, "dsgraph needs Python 3.10 or newer")


def _processors() -> Check:
    memory = ""
    with suppress(ValueError, OSError, AttributeError):
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return Check("processors", "ok", f"{os.cpu_count() or 'unknown'} cores{memory}")


def _compiler() -> Check:
    """Compile the headers that Inductor's kernels include."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(name.split()[0])
    if path is None:
        return Check("C++ compiler", "missing", advice=f"{name} was not found: install it, or set CXX")
    headers = sysconfig.get_path("include")
    if not (Path(headers) / "Python.h").is_file():
        return Check("C++ compiler", "broken", path, f"no Python.h in {headers}: install python3-dev")
    with tempfile.TemporaryDirectory(prefix="dsgraph-doctor-") as folder:
        source = Path(folder) / "try.cpp"
        source.write_text(_PROGRAM)
        openmp = ["-Xclang", "-fopenmp"] if sys.platform == "darwin" else ["-fopenmp"]
        command = [*name.split(), *openmp, "-I", headers, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_PATIENCE, check=False)
    if done.returncode != 0:
        problem = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        return Check("C++ compiler", "broken", path, f"it cannot compile a program with OpenMP: {problem}")
    return Check("C++ compiler", "ok", f"{path}, with Python.h and OpenMP")


def _caches() -> Check:
    """Write to the folders of Inductor's caches."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not folder:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user without a name
            user = str(os.getuid())
        folder = str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        advice = f"{error}: set TORCHINDUCTOR_CACHE_DIR to a folder that can be written to"
        return Check("caches", "broken", folder, advice)
    return Check("caches", "ok", folder)


def _graphviz() -> Check:
    path = shutil.which("dot")
    if path is None:
        return Check("dot", "missing", advice="install graphviz to draw graphs")
    return Check("dot", "ok", path)


def _calibration() -> Check:
    """Return which of this host's devices were calibrated, and when."""
    from dsgraph.compiler.costs.store import CalibrationError, load_all

    try:
        records = load_all(socket.gethostname())
    except CalibrationError as error:
        return Check("calibration", "broken", advice=str(error))
    if not records:
        return Check("calibration", "missing", advice="default costs are used; `dsgraph calibrate` measures them")
    return Check("calibration", "ok", "; ".join(f"{record.device}: {record.time}" for record in records))


def _optional(package: str) -> Check:
    """Return whether a package is installed; it is not imported, which may take long."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Check(package, "missing", advice=_OPTIONAL[package])
    if importlib.util.find_spec(package) is None:
        return Check(package, "broken", version, f"installed, but cannot be found: {_OPTIONAL[package]}")
    return Check(package, "ok", version)


_CHECKS: Mapping[str, Callable[[], Check]] = {
    "python": _python,
    "processors": _processors,
    "C++ compiler": _compiler,
    "caches": _caches,
    "calibration": _calibration,
    "dot": _graphviz,
}


def _with_torch() -> list[Check]:
    """Return what `dsgraph.tools.cli.programs.probe` finds."""
    lines, problem = _probe([sys.executable, "-c", f"from {probe.__name__} import main; main()"])
    expected = [*probe.REQUIRED, "torch", "two ranks", "process groups", "devices", "dsgraph", "torch.compile"]
    if sys.platform == "linux":
        expected.append("triton")
    found = {line["name"]: line for line in lines}
    checks = []
    for name in expected:
        if name in found:
            checks.append(_from_line(found[name]))
        elif problem:  # the process ended, or hung, in this one
            checks.append(Check(name, "broken", advice=problem))
            problem = ""
        else:
            checks.append(Check(name, "unknown", advice="not checked"))
    return checks


def _from_line(line: Mapping[str, Any]) -> Check:
    name, found, problem = line["name"], line["found"], line["problem"]
    if problem is not None:
        state = "missing" if problem.startswith("ModuleNotFoundError") else "broken"
        return Check(name, state, advice=problem)
    if name == "devices" and not found:
        return Check("devices", "missing", "no GPU")
    if name == "process groups" and "gloo" not in found:
        return Check(name, "broken", ", ".join(found), "this torch has no gloo")
    return Check(name, "ok", "; ".join(found) if isinstance(found, list) else found)


def _probe(command: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Return the lines that a process writes until it ends or its time is over, and what went wrong with it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        problem = ""
        try:
            if process.wait(_PATIENCE) != 0:
                problem = f"the check's process ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"took more than {_PATIENCE:.0f} s: run this again when the machine is less busy"
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        errors = err.read().decode(errors="replace").strip().splitlines()
        if problem and errors:
            problem += f": {errors[-1]}"
        return [json.loads(line) for line in out.read().splitlines()], problem


def _abilities(checks: Mapping[str, Check]) -> Iterator[Ability]:
    """Yield the abilities that follow from the checks."""

    def lacks(*names: str) -> str:
        return ", ".join(f"{name} {checks[name].state}" for name in names if name in checks and not checks[name].is_ok)

    loads = ["python", "torch", *probe.REQUIRED, "dsgraph", "torch.compile"]
    has_nccl = "nccl" in checks["process groups"].found.split("; ") if "process groups" in checks else False
    nccl = "" if has_nccl else "this torch has no NCCL"
    devices = lacks("devices") and "no GPU"
    yield Ability("train in one process", lacks(*loads))
    yield Ability("train on several processes, on CPUs (gloo)", lacks(*loads, "process groups", "two ranks"))
    yield Ability("train on GPUs (NCCL)", ", ".join(filter(None, [lacks(*loads), devices, nccl])))
    yield Ability('codegen "eager"', lacks(*loads))
    yield Ability('codegen "inductor" on CPUs', lacks(*loads, "C++ compiler", "caches"))
    gpu_kernels = [lacks(*loads, "C++ compiler", "caches", "triton"), devices]
    yield Ability('codegen "inductor" on GPUs', ", ".join(filter(None, gpu_kernels)))
    yield Ability("inspect dumps", lacks("python", "networkx", "tabulate"))
    yield Ability("draw graphs", lacks("dot"))
    yield Ability("plot memory", lacks("matplotlib"))
    yield Ability("transformers models in examples and tests", lacks("transformers"))
    yield Ability("compare with DeepSpeed", lacks("deepspeed"))
    yield Ability("compare with torchtitan", lacks("torchtitan"))


COMMAND = Command("doctor", "check which features of dsgraph work on this machine", _DESCRIPTION, _configure, _run)
