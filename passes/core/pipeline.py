"""A pipeline: the passes to run, checked for a valid order when it is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsgraph.passes.errors import PassError

from .context import Phase
from .graph_pass import GraphPass


@dataclass(frozen=True, init=False)
class Pipeline:
    """An ordered set of passes. Passes run phase by phase; within a phase, in the order in which they are listed.

    Raises:
        PassError: Something in the list is not a pass, two passes have one name, or a pass's `requires` or
            `conflicts` does not hold at its place.
    """

    passes: tuple[GraphPass, ...]

    def __init__(self, passes: Iterable[GraphPass] = ()) -> None:
        listed = tuple(passes)
        for item in listed:
            if not isinstance(item, GraphPass):
                raise PassError(
                    f"a pipeline holds GraphPass objects, found {item!r}; "
                    "make an instance of the class, or decorate the function with @dsgraph.graph_pass(phase=...)"
                )
            if not isinstance(getattr(item, "phase", None), Phase):
                raise PassError(f"pass {item.name} has no phase: give {type(item).__name__} a class attribute `phase`")
        # Stable, so the order within a phase is the user's.
        ordered = tuple(sorted(listed, key=lambda item: list(Phase).index(item.phase)))
        _check_contracts(ordered)
        object.__setattr__(self, "passes", ordered)

    def __iter__(self) -> Iterator[GraphPass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __add__(self, more: Iterable[GraphPass] | GraphPass) -> Pipeline:
        """Return this pipeline with one or several passes added; each runs last in its phase."""
        return Pipeline((*self.passes, *(more if isinstance(more, Iterable) else (more,))))

    def without(self, name: str) -> Pipeline:
        """Return this pipeline without the pass called `name`.

        Raises:
            PassError: There is no such pass.
        """
        if name not in {item.name for item in self.passes}:
            raise PassError(f"no pass called {name!r} in the pipeline; it has {[item.name for item in self.passes]}")
        return Pipeline(item for item in self.passes if item.name != name)

    @property
    def ends_with_capture(self) -> bool:
        """True if no pass sees the graphs that autograd makes of the captured graph."""
        return all(item.phase is Phase.CAPTURE for item in self.passes)

    def of(self, phase: Phase) -> tuple[GraphPass, ...]:
        """Return the passes of one phase, in order."""
        return tuple(item for item in self.passes if item.phase is phase)

    def fingerprint(self) -> tuple[str, ...] | None:
        """Return identifiers of the passes for torch's caches; None if one of them cannot be identified."""
        prints = []
        for item in self.passes:
            one = item.fingerprint()
            if one is None:
                return None
            prints.append(one)
        return tuple(prints)


def _check_contracts(passes: tuple[GraphPass, ...]) -> None:
    provided: dict[str, str] = {}
    seen: set[str] = set()
    for item in passes:
        if item.name in seen:
            raise PassError(f"pass {item.name} stands in the pipeline twice; give one of the two another name")
        seen.add(item.name)
        for fact in sorted(item.requires - provided.keys()):
            later = [other.name for other in passes if fact in other.provides]
            hint = f"move {item.name} after {later[0]}" if later else f"add a pass that provides {fact!r}"
            raise PassError(f"pass {item.name} requires {fact!r}, which no earlier pass provides: {hint}")
        for fact in sorted(item.conflicts & provided.keys()):
            raise PassError(f"pass {item.name} must run before {provided[fact]}, which provides {fact!r}")
        provided.update(dict.fromkeys(item.provides, item.name))
