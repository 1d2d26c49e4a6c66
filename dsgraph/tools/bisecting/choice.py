"""The setting that selects bisection: with it, the backend hands each captured graph to a `Bisection`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsgraph.compiler.options import BackendOptions
from dsgraph.compiler.request import CompileRequest, CompileWatch
from dsgraph.passes import CaptureFacts

from .bisection import Bisection


@dataclass(frozen=True)
class Bisecting:
    """The choice to bisect every graph of a program.

    Attributes:
        folder: Where the settings are and findings go.
    """

    folder: Path

    def facts(self, facts: CaptureFacts, options: BackendOptions) -> CaptureFacts:
        """Return `facts` unchanged: the graph runs where it was captured."""
        return facts

    def compiler(self, request: CompileRequest, watch: CompileWatch) -> Bisection:
        """Return the bisection of the graph of `request`.

        The program does not run its versions, so `watch` sees none of them.
        """
        return Bisection(self.folder, request)


def read_bisecting(environ: Mapping[str, str]) -> Bisecting | None:
    """Return the bisection that DSGRAPH_BISECT asks for, or None where it is not set."""
    folder = environ.get("DSGRAPH_BISECT")
    return Bisecting(Path(folder)) if folder else None
