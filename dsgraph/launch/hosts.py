"""Hosts and their slots: hostfiles, and the filters that choose among them.

A slot is the place of one rank: a GPU by its number, or a part of a machine without one. The grammar is DeepSpeed's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsgraph.utils.errors import LaunchError
from dsgraph.utils.nearest import nearest

LOCAL = "localhost"
"""The machine that this process runs on; it is reached without ssh."""

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_LINE = re.compile(r"(\S+)\s+slots=(\d{1,6})")


@dataclass(frozen=True)
class Host:
    """A machine that runs ranks.

    Attributes:
        name: Its name for ssh.
        slots: One for each rank, in the order of its local ranks.
    """

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Return the hosts of a file, in its order.

    Raises:
        LaunchError: It cannot be read, or see `parse_hostfile`.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"hostfile {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    return parse_hostfile(text, path)


def parse_hostfile(text: str, path: str = "hostfile") -> tuple[Host, ...]:
    """Return the hosts of a hostfile: a line `worker-1 slots=4` for each; `#` begins a comment.

    Args:
        text: The content of the file.
        path: Its name, for errors.

    Raises:
        LaunchError: A line has another form, a host occurs twice or has no slot, or there is no host.
    """
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise LaunchError(f"{path}, line {number}: {entry!r}; a line is a host and its slots: worker-1 slots=4")
        name, slots = check_name(match[1], f"{path}, line {number}"), int(match[2])
        if name in found:
            raise LaunchError(f"{path}, line {number}: {name} appears twice: remove one")
        if slots == 0:
            raise LaunchError(f"{path}, line {number}: {name} has no slot: remove it, or give it one")
        found[name] = Host(name, tuple(range(slots)))
    if not found:
        raise LaunchError(f"{path} names no host; a line is a host and its slots: worker-1 slots=4")
    return tuple(found.values())


def check_name(name: str, where: str) -> str:
    """Return the name of a host after checking that ssh and a shell take it for nothing else.

    Raises:
        LaunchError: It is not.
    """
    if _NAME.fullmatch(name) is None:
        raise LaunchError(
            f"{where}: {name!r} is no name of a host: it takes letters, digits, '_', '-' and '.'; user and other "
            "settings of a host belong into ~/.ssh/config"
        )
    return name


def include(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    """Return the hosts and slots that a filter names, hosts in the order of the hostfile.

    Args:
        hosts: All there are.
        text: `worker-1@worker-2:0,2`: all slots of the first, two of the second.

    Raises:
        LaunchError: See `_parse_filter`.
    """
    named = _parse_filter(hosts, text, "--include")
    return tuple(replace(host, slots=named[host.name] or host.slots) for host in hosts if host.name in named)


def exclude(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    """Return the hosts and slots that a filter does not name; a host without slots is left out.

    Args:
        hosts: All there are.
        text: As for `include`.

    Raises:
        LaunchError: See `_parse_filter`, or nothing is left.
    """
    named = _parse_filter(hosts, text, "--exclude")
    left = []
    for host in hosts:
        gone = named[host.name] or host.slots if host.name in named else ()
        left.append(replace(host, slots=tuple(slot for slot in host.slots if slot not in gone)))
    if not any(host.slots for host in left):
        raise LaunchError(f"--exclude {text} leaves no slot to run on")
    return tuple(host for host in left if host.slots)


def first(hosts: Sequence[Host], *, nodes: int | None, slots: int | None) -> tuple[Host, ...]:
    """Return the first hosts, with the first slots of each; None means all.

    Raises:
        LaunchError: There are fewer.
    """
    if nodes is not None and nodes > len(hosts):
        names = ", ".join(host.name for host in hosts)
        raise LaunchError(f"--num_nodes {nodes}: there are {len(hosts)} hosts ({names})")
    for host in hosts[:nodes]:
        if slots is not None and slots > len(host.slots):
            raise LaunchError(f"--num_gpus {slots}: {host.name} has {len(host.slots)} slots")
    return tuple(replace(host, slots=host.slots[:slots]) for host in hosts[:nodes])


def _parse_filter(hosts: Sequence[Host], text: str, option: str) -> dict[str, tuple[int, ...]]:
    """Return the slots of each host that a filter names, in its order; none if it names only the host.

    Raises:
        LaunchError: It names an unknown host or slot, or a host twice, or is no filter.
    """
    known = {host.name: host.slots for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        if name not in known:
            hint = nearest(name, known)
            raise LaunchError(f"{option} {text}: there is no host {name!r}{hint}; there are {', '.join(known)}")
        if name in found:
            raise LaunchError(f"{option} {text}: {name} appears twice: name all its slots at once")
        slots = numbers.split(",") if colon else []
        for slot in slots:
            if not re.fullmatch(r"[0-9]{1,6}", slot):
                raise LaunchError(f"{option} {text}: {slot!r} is no slot; it is written as {name}:0,2")
            if int(slot) not in known[name]:
                raise LaunchError(f"{option} {text}: {name} has no slot {slot}; it has {len(known[name])} from 0 on")
        found[name] = tuple(dict.fromkeys(int(slot) for slot in slots))
    return found
