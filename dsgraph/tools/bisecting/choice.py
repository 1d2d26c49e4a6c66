"""Whether a program is bisected: then the backend hands each captured graph to a `Bisection`."""

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
        """The graph runs where it was captured."""
        return facts

    def compiler(self, request: CompileRequest, watch: CompileWatch) -> Bisection:
        """What bisects the graph of `request`. Its versions are not the program's: `watch` sees none of them."""
        return Bisection(self.folder, request)


def read_bisecting(environ: Mapping[str, str]) -> Bisecting | None:
    """What DSGRAPH_BISECT asks for; None where it is not set."""
    folder = environ.get("DSGRAPH_BISECT")
    return Bisecting(Path(folder)) if folder else None
