"""Two hosts on one machine: network namespaces joined by a veth pair of a set rate.

Linux, root, `ip` and `tc` (Debian's iproute2). A token bucket (`tc ... tbf`) at both ends makes the rate, which counts
the headers of every frame of 1,500 bytes, as an Ethernet does: 95.6 % of it are left for the bytes of a program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "link0"  # at both ends
LEAST_BURST = 128 * 1024  # bytes; two of the largest packets that TCP hands over, with one the rate is not reached
BURST_SECONDS = 1e-3
QUEUE_BYTES = 16 * 2**20  # more than TCP has under way, so that nothing is dropped
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class LinkError(RuntimeError):
    """No namespaces, or no link between them; the message says what is missing, in one line."""


@dataclass(frozen=True)
class Host:
    """One end of a link.

    Attributes:
        namespace: Its network namespace.
        core: The one processor core of a process there.
    """

    namespace: str
    core: int

    def enter(self) -> None:
        """Move this process there. Call it before any thread is started: threads inherit what their starter has."""
        with (Path("/run/netns") / self.namespace).open("rb") as namespace:
            library = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
            if library.setns(namespace.fileno(), _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.namespace}")
        os.sched_setaffinity(0, {self.core})


@dataclass(frozen=True)
class Placement:
    """Puts rank 0 on the first host and rank 1 on the second, where gloo finds the link."""

    hosts: tuple[Host, Host]

    def __call__(self, rank: int) -> None:
        self.hosts[rank].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def parse_rate(text: str) -> float | None:
    """Return bits a second of a rate as `tc` writes it, such as `1gbit`; None for `unlimited`.

    Raises:
        ValueError: It is neither.
    """
    if text == "unlimited":
        return None
    found = re.fullmatch(r"([0-9.]+)([kmg]bit)", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is no rate; write one as 100mbit, 1gbit or unlimited")
    return float(found[1]) * _UNITS[found[2]]


@contextlib.contextmanager
def linked_hosts(rate: float | None) -> Iterator[tuple[Host, Host]]:
    """Two hosts and the link between them, which are gone afterwards, whatever happens.

    Args:
        rate: Of each direction, bits a second; None for as fast as the machine copies.

    Raises:
        LinkError: They cannot be made here.
    """
    require_hosts()
    cores = sorted(os.sched_getaffinity(0))
    first, second = (Host(f"dsgraph-{os.getpid()}-{end}", cores[end % len(cores)]) for end in (0, 1))
    try:
        for host in (first, second):
            _run(["ip", "netns", "add", host.namespace])
        ends = ["name", INTERFACE, "netns", first.namespace], ["name", INTERFACE, "netns", second.namespace]
        _run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        for number, host in enumerate((first, second), start=1):
            _set_up(host, f"10.0.0.{number}/24", rate)
        yield first, second
    finally:
        for host in (first, second):
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def require_hosts() -> None:
    """Make sure that hosts can be made here.

    Raises:
        LinkError: They cannot.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkError(
                f"two hosts are network namespaces, but there is no `{tool}`: install iproute2 (Linux only)"
            )
    if os.geteuid() != 0:
        raise LinkError(f"two hosts are network namespaces, which user {os.geteuid()} may not make: run it as root")
    name = f"dsgraph-{os.getpid()}-attempt"
    try:  # one of each
        _run(["ip", "netns", "add", name])
        _run(["ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", "link1"])
        _run(["tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *_bucket(1e9)])
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def interface_bytes() -> int:
    """Return the bytes that have left the host of this process over its link so far.

    Headers count once a packet that TCP hands over, which is split into up to 44 frames only further down.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise LinkError(f"this process has no interface {INTERFACE}; it did not enter a host of a link")


def _set_up(host: Host, address: str, rate: float | None) -> None:
    ip = ["ip", "-n", host.namespace]
    _run([*ip, "link", "set", "lo", "up"])
    _run([*ip, "link", "set", INTERFACE, "addrgenmode", "none"])  # no IPv6, whose announcements would be counted
    _run([*ip, "addr", "add", address, "dev", INTERFACE])
    _run([*ip, "link", "set", INTERFACE, "up"])
    if rate is not None:
        _run(["tc", "-n", host.namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *_bucket(rate)])


def _bucket(rate: float) -> list[str]:
    burst = max(LEAST_BURST, int(rate / 8 * BURST_SECONDS))
    return ["rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(QUEUE_BYTES)]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        raise LinkError(
            f"two hosts cannot be made here: `{' '.join(command)}` says {said!r}; "
            "it takes CAP_NET_ADMIN and CAP_SYS_ADMIN, and a kernel with veth and tbf"
        )
