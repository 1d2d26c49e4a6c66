"""The commands that start the ranks of a job on each of its hosts."""

from __future__ import annotations

import ipaddress
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsgraph.utils.errors import LaunchError

from .hosts import LOCAL, Host, check_name
from .script import OF_RANKS

PORT = 29500
"""Default port where ranks meet: that of torchrun and DeepSpeed."""

_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Job:
    """A job that runs on every host, with the same Python and in the same folder as this process.

    Attributes:
        script: The script for `dsgraph.launch.on_host`: a path, or "-m" and a module; then its arguments.
        exports: Environment variables of all ranks.
        sets_devices: True if a host's slots are numbers of GPUs, and its ranks shall see only these.
        max_restarts: Number of times that torchrun restarts all ranks after a failure.
        master_addr: Address of the first host, where ranks meet. None: its name; for a single host, a free address.
        master_port: Port there. None: the default.
        ssh_port: Port of ssh on all hosts. None: ssh's own settings.
    """

    script: Sequence[str]
    exports: Mapping[str, str] = field(default_factory=dict)
    sets_devices: bool = True
    max_restarts: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    ssh_port: int | None = None


@dataclass(frozen=True)
class HostCommand:
    """The command to start here for one host.

    Attributes:
        host: The host's name.
        command: Program and arguments; the program ends its ranks when its standard input is closed.
        environment: Its variables besides those of this process.
    """

    host: str
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """Return the command as one would type it into a shell."""
        return shlex.join(_with_variables(self.environment, self.command))


def commands_of(hosts: Sequence[Host], job: Job) -> tuple[HostCommand, ...]:
    """Return the command of each host.

    Args:
        hosts: At least one; ranks are numbered in their order.
        job: The job.

    Raises:
        LaunchError: A setting of `job` has no meaning on these hosts.
    """
    if job.ssh_port is not None and all(host.name == LOCAL for host in hosts):
        raise LaunchError("--ssh_port: no host is reached by ssh: leave it out, or give a hostfile")
    if job.sets_devices and _DEVICES in job.exports:
        raise LaunchError(f"--export {_DEVICES}: the slots of a host are its devices: choose them with --include")
    made = []
    for number, host in enumerate(hosts):
        options = [str(len(host.slots)), *_torchrun_options(hosts, number, job)]
        command = (sys.executable, "-u", "-m", "dsgraph.launch.on_host", *options, "--", *job.script)
        variables = dict(job.exports)
        if job.sets_devices:
            variables[_DEVICES] = ",".join(map(str, host.slots))
        if host.name == LOCAL:
            made.append(HostCommand(host.name, command, variables))
        else:
            made.append(HostCommand(host.name, _by_ssh(host.name, command, variables, job.ssh_port), {}))
    return tuple(made)


def _torchrun_options(hosts: Sequence[Host], number: int, job: Job) -> list[str]:
    """Return the options by which torchrun finds the other hosts.

    Without restarts each host has the position that it has in the hostfile. Restarted ranks must meet again, which only
    torchrun's "c10d" supports; it orders hosts by their addresses.
    """
    restarts = [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    if len(hosts) == 1 and job.master_addr is None and job.master_port is None:
        return ["--standalone", *restarts]
    address, port = _address(hosts, job), PORT if job.master_port is None else job.master_port
    nodes = f"--nnodes={len(hosts)}"
    if not restarts:
        return [nodes, f"--node-rank={number}", f"--master-addr={address}", f"--master-port={port}"]
    is_first = "true" if number == 0 else "false"
    return [
        *(nodes, "--rdzv-backend=c10d", "--rdzv-id=dsgraph", f"--rdzv-endpoint={address}:{port}"),
        *(f"--rdzv-conf=is_host={is_first}", f"--local-addr={address if number == 0 else hosts[number].name}"),
        *restarts,
    ]


def _address(hosts: Sequence[Host], job: Job) -> str:
    if job.master_addr is None:
        if hosts[0].name == LOCAL and len(hosts) > 1:
            raise LaunchError(f"the first host is {LOCAL}, which other hosts cannot reach: give --master_addr")
        return hosts[0].name
    try:
        found = ipaddress.ip_address(job.master_addr.strip("[]"))
    except ValueError:
        return check_name(job.master_addr, "--master_addr")
    return f"[{found}]" if found.version == 6 else str(found)


def _by_ssh(name: str, command: Sequence[str], variables: Mapping[str, str], port: int | None) -> tuple[str, ...]:
    """Return the command for ssh, whose last argument is interpreted by a remote shell: all of it is quoted."""
    there = shlex.join(_with_variables(variables, command))
    options = ["-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
    if port is not None:
        options += ["-p", str(port)]
    return ("ssh", *options, name, f"cd {shlex.quote(str(Path.cwd()))} && exec {there}")


def _with_variables(variables: Mapping[str, str], command: Sequence[str]) -> list[str]:
    return [*(["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []), *command]


def read_export(text: str) -> tuple[str, str]:
    """Return the name and value in `NAME=VALUE`, or in `NAME`, whose value is that of this process.

    Raises:
        LaunchError: It is neither, or there is no such variable.
    """
    name, equals, value = text.partition("=")
    if not (name.isascii() and name.isidentifier()):
        raise LaunchError(f"--export {text!r}: {name!r} is no name of a variable; write NAME or NAME=VALUE")
    if name in OF_RANKS:
        raise LaunchError(f"--export {name}: torchrun sets it for each rank: leave it out")
    if equals:
        return name, value
    if name not in os.environ:
        raise LaunchError(f"--export {name}: there is no such variable here: set it, or write {name}=VALUE")
    return name, os.environ[name]
