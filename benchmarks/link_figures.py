"""Quantities of `benchmarks.links`: bytes to send, the fastest possible step, and the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.report import Check, Row, ratio
from benchmarks.systems import MICRO_BATCHES, SYSTEMS, System, compute_name

RANKS = 2  # one a host
STAGE_3_PEERS = [name for name, system in SYSTEMS.items() if system.is_peer and system.memory == 3]


def theory_bytes(system: System, parameter_bytes: int) -> float | None:
    """Return the bytes that a rank must send a step by the definition of its memory class; None for what has none.

    Gathers and reductions move `(n - 1) / n` of the parameters each; an all-reduce is one of either.
    """
    if system.memory is None:
        return None
    gathers = 2 * system.micro_batches if system.memory == 3 else 1
    return (gathers + system.reductions) * parameter_bytes * (RANKS - 1) / RANKS


def bound_seconds(compute: float | None, sends: float, rate: float | None) -> float | None:
    """Return seconds below which no step can be; None when it is not known what computing takes.

    Args:
        compute: Seconds of computing alone.
        sends: Bytes that a rank sends.
        rate: Of the link, bits a second; None for one without a limit.
    """
    if compute is None:
        return None
    return compute if rate is None else max(compute, 8 * sends / rate)


def heats(names: Sequence[str], systems: Mapping[str, System]) -> list[list[str]]:
    """Return the heats: systems of equally many micro-batches, timed in turns, each heat with its reference."""
    counts = sorted({systems[name].micro_batches for name in names})
    found = []
    for count in counts:
        heat = [name for name in names if systems[name].micro_batches == count]
        found.append(list(dict.fromkeys([compute_name(count), *heat])))
    return found


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach, of the rates and systems that were measured."""
    by_rate: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_rate.setdefault(row["rate"], {})[row["system"]] = row
    slow, free = by_rate.get("1gbit", {}), by_rate.get("unlimited", {})
    found = []
    if {"dsgraph-3", compute_name(1)} <= slow.keys():
        found.append(Check("1gbit: dsgraph-3 step time over the bound", slow["dsgraph-3"]["step/bound"], 1.20, "lower"))
    for rate, among, limit in (("1gbit", slow, 0.60), ("unlimited", free, 0.65)):
        peers = [name for name in among if name in STAGE_3_PEERS]
        for ours in ("dsgraph-3", "dsgraph-3-spare"):
            if peers and ours in among:
                value = ratio(among[ours]["step_s"], [among[peer]["step_s"] for peer in peers])
                of_peers = f"the fastest of {', '.join(peers)}"
                found.append(Check(f"{rate}: {ours} step time over {of_peers}", value, limit, "lower"))
    theirs = f"ddp-x{MICRO_BATCHES}"
    for ours in (f"dsgraph-2-x{MICRO_BATCHES}", f"dsgraph-2-once-x{MICRO_BATCHES}"):
        if {ours, theirs} <= slow.keys():
            value = ratio(slow[ours]["step_s"], [slow[theirs]["step_s"]])
            found.append(Check(f"1gbit: {ours} step time over {theirs}, which uses no_sync", value, 1.0, "lower"))
    sent = [ratio(row["wire_mb"], [row["theory_mb"]]) for row in rows if row["system"] == "dsgraph-3"]
    if sent:
        most = None if None in sent else max(value for value in sent if value is not None)
        found.append(Check("dsgraph-3 bytes sent over the bytes that stage 3 needs", most, 1.01, "lower"))
    return found
