"""The profile of the FLOPS profiler as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tabulate import tabulate

from dsgraph.engine.config.engine_config import FlopsProfilerConfig


class Profiled(Protocol):
    """One module of a profile, see `ModuleProfile`."""

    @property
    def name(self) -> str:
        """Its name in the model."""

    @property
    def kind(self) -> str:
        """Its class."""

    @property
    def parameters(self) -> int:
        """Elements of its parameters."""

    @property
    def forward(self) -> int:
        """Operations of its forward."""

    @property
    def backward(self) -> int:
        """Operations of its derivative."""

    @property
    def macs(self) -> int:
        """Multiplications with an addition."""

    @property
    def seconds(self) -> float:
        """Seconds of its calls."""

    @property
    def depth(self) -> int:
        """Its depth in the model."""


def profile_text(modules: Sequence[Profiled], section: FlopsProfilerConfig, *, unknown: str = "") -> str:
    """Return the complete profile.

    Args:
        modules: The modules, the model first.
        section: The settings of the profile.
        unknown: Why operations could not be counted; empty if they were.
    """
    model = modules[0]
    parts = [
        f"profile of one micro-batch on one rank, after step {section.profile_step}",
        tabulate(
            [
                ["parameters", number(model.parameters)],
                ["forward", f"{number(model.macs)} MACs, {number(model.forward)} operations"],
                ["backward", f"{number(model.backward)} operations"],
                ["forward, uncompiled", f"{1000 * model.seconds:.4g} ms, {_rate(model)}"],
            ],
            tablefmt="plain",
        ),
    ]
    if unknown:
        parts.append(f"operations are not counted: {unknown}")
    parts.append(_of_depths(modules, section))
    if section.detailed:
        parts.append(_tree(modules))
    return "\n\n".join(parts)


def _of_depths(modules: Sequence[Profiled], section: FlopsProfilerConfig) -> str:
    """Return, for each depth, the modules with the most parameters, operations and time."""
    deepest = max(module.depth for module in modules)
    last = deepest if section.module_depth == -1 else min(section.module_depth, deepest)
    rows = []
    for depth in range(last + 1):
        here = [module for module in modules if module.depth == depth]
        rows.append([depth, *(_top(here, kind, section.top_modules) for kind in ("parameters", "macs", "seconds"))])
    return tabulate(rows, ("depth", "most parameters", "most MACs", "longest"), tablefmt="plain")


def _top(modules: Sequence[Profiled], what: str, count: int) -> str:
    sums: dict[str, float] = {}
    for module in modules:
        sums[module.kind] = sums.get(module.kind, 0) + getattr(module, what)
    best = sorted(sums.items(), key=lambda item: -item[1])[:count]
    say = (lambda value: f"{1000 * value:.4g} ms") if what == "seconds" else (lambda value: number(int(value)))
    return ", ".join(f"{kind} {say(value)}" for kind, value in best)


def _tree(modules: Sequence[Profiled]) -> str:
    model = modules[0]
    rows = [
        [
            "\u00b7 " * module.depth + (f"{module.name.rpartition('.')[2]}: " if module.name else "") + module.kind,
            *_with_share(number(module.parameters), module.parameters, model.parameters),
            *_with_share(number(module.macs), module.macs, model.macs),
            *_with_share(f"{1000 * module.seconds:.4g}", module.seconds, model.seconds),
            _rate(module),
        ]
        for module in modules
    ]
    head = ("module", "parameters", "%", "MACs", "%", "ms", "%", "speed")
    return tabulate(rows, head, tablefmt="plain", disable_numparse=True, colalign=("left", *["right"] * 7))


def _with_share(text: str, part: float, whole: float) -> tuple[str, str]:
    return text, f"{100 * part / whole:.1f}" if whole else ""


def _rate(module: Profiled) -> str:
    return f"{number(int(module.forward / module.seconds))}FLOPS" if module.seconds and module.forward else ""


def number(value: int) -> str:
    """Return a number with a prefix of powers of ten: 124439808 -> "124.4 M"."""
    for size, prefix in ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.4g} {prefix}"
    return str(value)
