"""`dsgraph emit`: the kernels of a program for a GPU that this machine does not have."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from dsgraph.launch.processes import describe_exit
from dsgraph.launch.script import add_script_arguments, find_script, rank_count, run_script
from dsgraph.tools.cli.command import Answer, Command, CommandError, make_folder
from dsgraph.tools.cli.table import table
from dsgraph.tools.dumping.render import bytes_text
from dsgraph.tools.dumping.units import spelled
from dsgraph.utils.files import write_whole

INDEX = "kernels.json"
FORMAT = "dsgraph-kernels"
# Most ops of a kernel that the table names.
_OPS = 6
# Most characters of a kernel's name in the table.
_NAME = 30

_DESCRIPTION = """\
Generate the GPU code of a script without a GPU. The script runs on the CPU up to its first optimizer step. For each
graph that it compiles with dsgraph, the command writes the code that Inductor would generate for an NVIDIA GPU, the
source of each Triton kernel, and each kernel compiled to a cubin for each architecture. Then it prints the resources
and the predicted time of each kernel and of each library call. Inductor measures several configurations of a kernel and
picks one: the table shows the fewest and the most registers, the most shared memory and the fewest bytes of spilled
registers among them. Passes use the costs of the first architecture. The script itself runs without passes.
Exit code 1: a kernel spills registers in every configuration, a graph could not be emitted, or the script failed."""


def _configure(parser: argparse.ArgumentParser) -> None:
    add_script_arguments(parser)
    parser.add_argument(
        "--arch", default="sm_90", metavar="NAMES", help="architectures, comma-separated: sm_80,sm_90 (default: sm_90)"
    )
    parser.add_argument(
        "--out", default="dsgraph-kernels", metavar="DIR", help="output folder (default: dsgraph-kernels)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace older kernels in that folder once the new ones are complete"
    )
    parser.add_argument(
        "--ranks",
        type=rank_count,
        default=1,
        metavar="N",
        help="generate the code of one rank of N, on simulated ranks (default: 1)",
    )
    parser.add_argument(
        "--whole", action="store_true", help="run the script to its end instead of its first optimizer step"
    )


def _run(arguments: argparse.Namespace) -> Answer:
    script = find_script(arguments.script, arguments.module)
    archs = _archs(arguments.arch)
    out = Path(arguments.out).absolute()
    older = _make_room(out, overwrite=arguments.overwrite)
    with tempfile.TemporaryDirectory(prefix="dsgraph-emit-") as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps({"archs": archs, "out": str(out)}))
        until = "end" if arguments.whole else "step"
        code = run_script(
            script,
            arguments.rest,
            nproc=1,
            environment=_environment(name, arguments.ranks),
            quiet=arguments.json,
            runner=("-m", "dsgraph.tools.emission.program", str(arguments.ranks), until),
        )
        graphs = [json.loads(path.read_text()) for path in folder.glob("graph*.json")]
        if not graphs and code == 0:
            kept = "; the older kernels are unchanged" if older else ""
            raise CommandError(f"nothing to emit: the script has compiled no graph with backend='dsgraph'{kept}")
        index = _index(graphs, archs=archs, ranks=arguments.ranks, code=code)
        keeps = bool(older) and all(graph["problem"] is not None for graph in graphs)
        if not keeps:
            try:
                _replace(older, folder / "out", out)
                write_whole(out / INDEX, (json.dumps(index, indent=1) + "\n").encode())
            except OSError as error:
                raise CommandError(
                    f"{out} cannot be written to ({error.strerror}); give --out another folder"
                ) from None
    return report(index, folder=arguments.out, keeps_older=keeps)


def _index(graphs: Sequence[Mapping[str, Any]], *, archs: Sequence[str], ranks: int, code: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": 1,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {package: metadata.version(package) for package in ("torch", "triton")},
        "archs": archs,
        "ranks": ranks,
        "script_exit_code": code,
        "graphs": sorted(graphs, key=lambda graph: (graph["graph"], _PHASES.index(graph["phase"]), graph["arch"])),
    }


# Files of an emission besides its index. No other file is deleted.
_PART = re.compile(r"sm_\d+/graph\d+-(forward|backward|inference)(\.py|/[^/]+\.(py|ttir|ptx|cubin))")
_PHASES = ("capture", "inference", "forward", "backward")


def _archs(text: str) -> list[str]:
    from dsgraph.utils.errors import EmissionError

    try:
        from dsgraph.tools.emission.harness import check_versions

        check_versions(metadata.version("torch"), metadata.version("triton"))
    except metadata.PackageNotFoundError as error:
        raise CommandError(f"emitting kernels needs {error.name}, which is not installed") from None
    except EmissionError as error:
        raise CommandError(str(error)) from None
    from dsgraph.passes.analysis.hardware import GPUS

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in GPUS:
            known = ", ".join(f"{arch} ({gpu.name})" for arch, gpu in GPUS.items())
            raise CommandError(f"--arch {name!r} is not known; known: {known}")
    return names


def _environment(folder: str, ranks: int) -> dict[str, str]:
    """Return the environment of the script: one rank of `ranks`, and no GPU, so that it computes on the CPU."""
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**world, "CUDA_VISIBLE_DEVICES": "", "DSGRAPH_EMIT": folder, "DSGRAPH_DUMP": "", "DSGRAPH_BISECT": ""}


def _make_room(out: Path, *, overwrite: bool) -> list[Path]:
    """Check that the folder can be written to, and return the older kernels in it, which may be overwritten.

    Raises:
        CommandError: It cannot be written to, or it contains older kernels that may not be overwritten, or other files.
    """
    make_folder("--out", out)
    files = [path for path in sorted(out.rglob("*")) if not path.is_dir() or path.is_symlink()]
    for path in files:
        name = path.relative_to(out).as_posix()
        if path.is_symlink() or (name != INDEX and not _PART.fullmatch(name)):
            raise CommandError(f"{out} holds {name}, which `dsgraph emit` did not write; give --out another folder")
    if files and not overwrite:
        raise CommandError(f"{out} holds older kernels; give --overwrite to replace them, or --out another folder")
    return files


def _replace(older: Sequence[Path], fresh: Path, out: Path) -> None:
    """Replace the older files by the emitted ones, if there are any."""
    emitted = {out / path.relative_to(fresh): path for path in fresh.rglob("*") if path.is_file()}
    for target, path in emitted.items():
        write_whole(target, path.read_bytes())
    for path in older:
        if path not in emitted:
            path.unlink(missing_ok=True)
    for path in sorted((path for path in out.rglob("*") if path.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()


def report(index: Mapping[str, Any], *, folder: str, keeps_older: bool = False) -> Answer:
    """Return the answer about what was emitted.

    Args:
        index: The contents of the emission's `kernels.json`.
        folder: Its folder, as the user calls it.
        keeps_older: True if older kernels were kept, because nothing could be emitted.
    """
    graphs = index["graphs"]
    parts = [_describe_graph(graph) for graph in graphs]
    triton = [kernel for graph in graphs for kernel in graph["kernels"] if kernel["kind"] == "triton"]
    spilling = [kernel["name"] for kernel in triton if min(_figures(kernel, "spill_bytes"))]
    failed = [graph for graph in graphs if graph["problem"] is not None]
    spills = [spilled for kernel in triton for spilled in _figures(kernel, "spill_bytes")]
    end = [f"{folder}: {len(triton)} Triton kernels in {len(spills)} configurations, each a cubin; {INDEX}"]
    if keeps_older:
        end = [f"{folder}: the older kernels are unchanged, because nothing was emitted"]
    if spilling:
        end.append(f"{len(spilling)} kernels spill registers: {', '.join(dict.fromkeys(spilling))}")
    elif any(spills):
        end.append(
            "each kernel has a configuration that spills no registers; "
            f"{sum(map(bool, spills))} of {len(spills)} configurations spill"
        )
    elif triton:
        end.append("no kernel spills registers")
    if failed:
        end.append(f"{len(failed)} of {len(graphs)} graphs could not be emitted")
    if index["script_exit_code"] != 0:
        end.append(f"the script failed ({describe_exit(index['script_exit_code'])})")
    good = not spilling and not failed and index["script_exit_code"] == 0
    return Answer("\n\n".join([*parts, "\n".join(end)]), index, code=0 if good else 1)


def _describe_graph(graph: Mapping[str, Any]) -> str:
    """Return one graph on one architecture: its kernels in the order in which they first run."""
    head = f"graph {graph['graph']} {graph['phase']}, {graph['arch']} ({graph['gpu']}): {graph['function']}"
    if graph["problem"] is not None:
        return f"{head}\n  not emitted: {graph['problem']}"
    kernels = graph["kernels"]
    headers = ["kernel", "calls", "ops", "regs", "shared", "spills", "bytes", "FLOPs", "us"]
    rows = [_row(kernel) for kernel in kernels]
    seconds = sum(kernel["calls"] * kernel["seconds"] for kernel in kernels)
    calls = sum(kernel["calls"] for kernel in kernels)
    lines = [head, table(rows, headers, right=(1, 3, 4, 5, 6, 7, 8))] if rows else [head]
    each = f" in each of {spelled(graph['blocks'])}" if graph["blocks"] else ""
    lines.append(f"{calls} kernels in sequence, predicted to take {1e6 * seconds:.0f} us{each}")
    if graph["collectives"]:
        counts = sorted(graph["collectives"].items())
        listing = ", ".join(f"{count} {name.split('.')[1].rstrip('_')}" for name, count in counts)
        lines.append(f"collectives: {listing}")
    return "\n".join(lines)


def _row(kernel: Mapping[str, Any]) -> list[str]:
    if kernel["configurations"]:
        registers = _figures(kernel, "registers")
        shared, spills = max(_figures(kernel, "shared_bytes")), min(_figures(kernel, "spill_bytes"))
        taken = ["-".join(map(str, sorted({min(registers), max(registers)}))), bytes_text(shared), bytes_text(spills)]
    else:
        taken = ["", "", ""]
    return [
        _short(kernel["name"]),
        str(kernel["calls"]),
        _listed(kernel["ops"]),
        *taken,
        bytes_text(kernel["bytes"]),
        _number(kernel["flops"]),
        f"{1e6 * kernel['seconds']:.1f}",
    ]


def _figures(kernel: Mapping[str, Any], name: str) -> list[int]:
    """Return one resource of each of a kernel's configurations."""
    return [config["resources"][name] for config in kernel["configurations"]]


def _short(name: str) -> str:
    """Return `triton_poi_fused_add_mul_..._3`: the ops stand in a column of their own."""
    if len(name) <= _NAME:
        return name
    end = f"..{name[name.rindex('_') :]}"
    return name[: _NAME - len(end)] + end


def _listed(ops: Sequence[str]) -> str:
    shown = " ".join(ops[:_OPS])
    return f"{shown} +{len(ops) - _OPS}" if len(ops) > _OPS else shown


def _number(count: int | None) -> str:
    """Return `1.5 M`, `24 G`."""
    if count is None:
        return "?"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


COMMAND = Command("emit", "write the GPU kernels of a script without a GPU", _DESCRIPTION, _configure, _run, True)
