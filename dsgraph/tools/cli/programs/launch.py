"""`dsgraph launch`: the ranks of a script, on this machine or on the hosts of a hostfile."""

from __future__ import annotations

import argparse
import os

from dsgraph.launch import hosts as known
from dsgraph.launch.commands import PORT, Job, commands_of, read_export
from dsgraph.launch.hosts import LOCAL, Host
from dsgraph.launch.script import rank_count
from dsgraph.launch.together import run_together
from dsgraph.tools.cli.command import Answer, Command
from dsgraph.utils.errors import LaunchError

_DESCRIPTION = """\
Start a script under torchrun on this machine, or over ssh on each host of a hostfile. Arguments after SCRIPT are passed
to the script. If a host fails, the others are stopped, and the exit code is that of the host that failed first. See
docs/guides/several-hosts.md."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [options] SCRIPT [ARGUMENTS]"
    _add_hosts(parser)
    parser.add_argument("--master_addr", metavar="A", help="address of rank 0 (default: the name of the first host)")
    parser.add_argument(
        "--master_port", type=_port, metavar="P", help=f"port of rank 0 (default: {PORT}; for one host, a free port)"
    )
    parser.add_argument(
        "--ssh_port", type=_port, metavar="P", help="port of ssh on all hosts (default: from the configuration of ssh)"
    )
    parser.add_argument(
        "--max_restarts",
        type=_count,
        default=0,
        metavar="N",
        help="number of times torchrun restarts all ranks after a failure (default: 0)",
    )
    parser.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set an environment variable on all ranks (default value: the one in this shell); may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command of each host without starting it")
    parser.add_argument("-m", "--module", action="store_true", help="run SCRIPT as a module, as python -m does")
    parser.add_argument("script", metavar="SCRIPT", help="path of a Python script; the same on all hosts")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-H", "--hostfile", metavar="FILE", help="hosts, one per line: `worker-1 slots=4` (default: only this machine)"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "-i", "--include", metavar="HOSTS", help="run only on these: worker-1@worker-2:0,2 is a host and two slots"
    )
    chosen.add_argument(
        "-e", "--exclude", metavar="HOSTS", help="run on all hosts except these; same format as --include"
    )
    parser.add_argument("--num_nodes", type=rank_count, metavar="N", help="run on the first N hosts")
    parser.add_argument(
        "--num_gpus",
        type=rank_count,
        metavar="N",
        help="ranks per host (default: its slots; on this machine its GPUs, or 1)",
    )


def _run(arguments: argparse.Namespace) -> Answer:
    chosen = _hosts(arguments)
    job = Job(
        script=[*(["-m"] if arguments.module else []), arguments.script, *arguments.rest],
        exports=dict(map(read_export, arguments.export)),
        sets_devices=bool(arguments.hostfile or arguments.include or arguments.exclude),
        max_restarts=arguments.max_restarts,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
        ssh_port=arguments.ssh_port,
    )
    commands = commands_of(chosen, job)
    if arguments.dry_run:
        data = [{"host": each.host, "command": str(each)} for each in commands]
        return Answer("\n".join(str(each) for each in commands), data)
    code = run_together(commands, quiet=arguments.json)
    return Answer("", {"exit_code": code} if arguments.json else None, code)


def _hosts(arguments: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts and slots that the options choose."""
    named = arguments.include or arguments.exclude
    if named and (arguments.num_nodes or arguments.num_gpus):
        raise LaunchError("--include and --exclude choose hosts and slots: leave out --num_nodes and --num_gpus")
    if arguments.hostfile is not None:
        found = known.read_hostfile(arguments.hostfile)
    elif arguments.num_gpus is not None:
        found = (Host(LOCAL, tuple(range(arguments.num_gpus))),)
    else:
        if named and "CUDA_VISIBLE_DEVICES" in os.environ:
            raise LaunchError("--include or --exclude, and CUDA_VISIBLE_DEVICES in the environment: leave one out")
        found = (Host(LOCAL, tuple(range(_gpus_here() or 1))),)
    if arguments.include is not None:
        return known.include(found, arguments.include)
    if arguments.exclude is not None:
        return known.exclude(found, arguments.exclude)
    return known.first(found, nodes=arguments.num_nodes, slots=arguments.num_gpus)


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"is {text!r}; it takes a port from 1 to 65535")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}; it takes a whole number from 0 on")
    return int(text)


COMMAND = Command(
    "launch",
    "start the ranks of a script on one or several machines",
    _DESCRIPTION,
    _configure,
    _run,
    script_ends_options=True,
)
