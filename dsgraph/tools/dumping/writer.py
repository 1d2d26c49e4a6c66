"""Writes every graph of a compile, before and after every pass, as Python text to read and as JSON."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from dsgraph import __version__
from dsgraph.partitioning.blocks.unit import WHOLE_MODEL, Unit
from dsgraph.passes import CaptureFacts, PassContext, PassRecord
from dsgraph.utils.errors import StrictError
from dsgraph.utils.files import write_whole
from dsgraph.utils.json_records import to_json_text

from .contents import rank_folders, remove_compiles
from .describe import Describer, ParameterNames, memory_of, pieces
from .history import Snapshot, note_changes
from .records import (
    COMPILE_FORMAT,
    GRAPH_FORMAT,
    NODES_BEGIN,
    VERSION,
    AxisRecord,
    CompileRecord,
    GraphRecord,
    NodeRecord,
    ParameterRecord,
    StepRecord,
)
from .render import headline, render_function, render_node

LARGEST_GRAPH = 64 * 2**20

MANIFEST = "compile.json"


@dataclass
class DumpFolder:
    """A folder that receives the first few compiles of this process: `FOLDER/rank0/compile1/...`.

    What an earlier process has dumped for this rank is removed when the first graph is written.

    Attributes:
        folder: The user's folder, an absolute path.
        largest: A graph whose text or JSON is larger is left out. Bytes.
        compiles: How many were begun.
    """

    folder: Path
    largest: int = LARGEST_GRAPH
    compiles: int = 0
    _has_failed: bool = False

    def begin(
        self,
        facts: CaptureFacts,
        *,
        codegen: str,
        strict: bool,
        most: int,
        of: str = "",
        unit: Unit = WHOLE_MODEL,
        in_step: bool = True,
    ) -> GraphDump | None:
        """Return the dump of one more compile; None when enough were written, or when writing has failed before.

        Args:
            facts: Of the captured graph.
            codegen: The code generator.
            strict: Whether a file system that refuses is an error.
            most: How many compiles are written.
            of: The user's function, see `CompileRecord`.
            unit: The unit of a step that the graph is part of.
            in_step: True if gradients are enabled.
        """
        self.compiles += 1
        if self.compiles > most or (self._has_failed and not strict):
            return None
        rank, world = _rank_and_world()
        names = ParameterNames(facts)
        record = CompileRecord(
            format=COMPILE_FORMAT,
            version=VERSION,
            rank=rank,
            world=world,
            compile=self.compiles,
            time=datetime.now().astimezone().isoformat(timespec="seconds"),
            dsgraph=__version__,
            torch=torch.__version__,
            codegen=codegen,
            function=of,
            module=unit.module,
            block=unit.block,
            blocks=unit.blocks,
            in_step=in_step,
            is_step=facts.is_step,
            axes=tuple(AxisRecord(axis.name, axis.size, axis.group, axis.backend) for axis in facts.axes),
            parameters=_parameters(facts, names),
        )
        place = self.folder / f"rank{rank}"
        if self.compiles == 1:
            self.attempt(partial(self._remove_older, rank, world), strict=strict)
        return GraphDump(self, place / f"compile{self.compiles}", record, Describer(names), strict=strict)

    def _remove_older(self, rank: int, world: int) -> None:
        """Remove what an earlier run has dumped for this rank.

        The first rank also removes ranks that no longer exist.
        """
        for number, place in list(rank_folders(self.folder)):
            if number == rank or (rank == 0 and number >= world):
                remove_compiles(place)

    def attempt(self, write: Callable[[], object], *, strict: bool) -> None:
        """Call `write`; when the file system refuses, warns once, and nothing is written any more.

        Raises:
            StrictError: It refuses, and `strict`.
        """
        if self._has_failed and not strict:
            return
        try:
            write()
        except OSError as error:
            self._has_failed = True
            message = f"dsgraph cannot dump graphs to {self.folder} ({error})"
            if strict:
                raise StrictError(message) from error
            warnings.warn(f"{message}; going on without", stacklevel=2)


@dataclass
class GraphDump:
    """The graphs of one compile: `joint-2-insert_zero_collectives.py` and `.json`, listed in `compile.json`."""

    folder: DumpFolder
    place: Path
    record: CompileRecord
    describer: Describer
    strict: bool
    _texts: _Texts = field(default_factory=lambda: _Texts())
    # By the graph's name: a pair of graphs is written in turns.
    _last: dict[str, GraphRecord] = field(default_factory=dict)
    _before: dict[str, Snapshot] = field(default_factory=dict)

    def write(self, gm: GraphModule, ctx: PassContext, *, number: int, record: PassRecord | None) -> None:
        """Write a graph and list it."""
        started = time.perf_counter()
        pass_name = record.name if record is not None else ""
        touched = 0
        before = self._before.get(ctx.graph)
        if before is not None and record is not None:
            touched = note_changes(gm, before, phase=ctx.graph, pass_name=pass_name)
        elif ctx.part != "backward":  # of a pair the second, which begins along with the first
            self.describer.forget_nodes()
            self._texts, self._before, self._last = _Texts(), {}, {}
        self._before[ctx.graph] = Snapshot.of(gm)
        graph = f"{ctx.graph}-{number}-{pass_name or 'before'}"
        if record is not None and touched == 0 and ctx.graph in self._last:
            step = self._same_again(graph, ctx.graph, record)
        else:
            memory = memory_of(gm, ctx, fused=self.record.codegen == "inductor")
            last = self._last[ctx.graph] = GraphRecord(
                format=GRAPH_FORMAT,
                version=VERSION,
                graph=graph,
                rank=self.record.rank,
                compile=self.record.compile,
                phase=ctx.graph,
                number=number,
                pass_name=pass_name,
                nodes=self.describer.nodes(gm, ctx),
                live=memory.live if memory is not None else (),
                memory=pieces(memory) if memory is not None else (),
                bodies=self.describer.bodies(gm),
            )
            step = replace(_step(last, record), touched=touched, left_out=self._write_graph(last))
        step = replace(step, dump_seconds=round(time.perf_counter() - started, 6))
        self.record = replace(self.record, steps=(*self.record.steps, step))
        manifest = to_json_text(self.record).encode()
        self.folder.attempt(partial(write_whole, self.place / MANIFEST, manifest), strict=self.strict)

    def _same_again(self, graph: str, phase: str, record: PassRecord) -> StepRecord:
        before = next(step for step in reversed(self.record.steps) if step.phase == phase)
        same_as = before.same_as or before.graph
        text = f"# unchanged by pass {record.name}: see {same_as}.py\n".encode()
        self.folder.attempt(partial(write_whole, self.place / f"{graph}.py", text), strict=self.strict)
        return replace(before, graph=graph, same_as=same_as, number=before.number + 1, **_about(record))

    def _write_graph(self, graph: GraphRecord) -> str:
        """Write both files; returns why they were left out, if they were."""
        texts = {".py": self._texts.python(graph).encode(), ".json": self._texts.json(graph).encode()}
        for suffix, text in texts.items():
            if len(text) > self.folder.largest:
                return f"its {suffix} has {len(text):,} bytes, more than {self.folder.largest:,}"
        for suffix, text in texts.items():
            self.folder.attempt(partial(write_whole, self.place / f"{graph.graph}{suffix}", text), strict=self.strict)
        return ""


@dataclass
class _Texts:
    """The text of a graph of which one pass changes little: each node's part is made once."""

    _texts: dict[int, tuple[NodeRecord, str, str]] = field(default_factory=dict)

    def python(self, graph: GraphRecord) -> str:
        bodies = [render_function(body.name, body.nodes, render=self._line) for body in graph.bodies]
        functions = [render_function(graph.phase, graph.nodes, render=self._line), *bodies]
        return "\n".join([headline(graph), *("\n".join(lines) + "\n" for lines in functions)])

    def json(self, graph: GraphRecord) -> str:
        """Return one node a line."""
        head = to_json_text(replace(graph, nodes=()))
        nodes = ",\n".join(map(self._fragment, graph.nodes))
        return f"{head[:-1]}, {NODES_BEGIN}\n{nodes}\n]}}\n"

    def _line(self, node: NodeRecord) -> str:
        return self._both(node)[1]

    def _fragment(self, node: NodeRecord) -> str:
        return self._both(node)[2]

    def _both(self, node: NodeRecord) -> tuple[NodeRecord, str, str]:
        found = self._texts.get(id(node))
        if found is None:
            found = self._texts[id(node)] = (node, render_node(node), to_json_text(node))
        return found


def _step(graph: GraphRecord, record: PassRecord | None) -> StepRecord:
    collectives = [node.collective for node in graph.nodes if node.collective is not None]
    step = StepRecord(
        graph=graph.graph,
        phase=graph.phase,
        number=graph.number,
        nodes=len(graph.nodes),
        collectives=len(collectives),
        sent=sum(item.sent or 0 for item in collectives),
        peak=max(graph.live, default=None),
    )
    return step if record is None else replace(step, **_about(record))


def _about(record: PassRecord) -> dict[str, Any]:
    return {
        "pass_name": record.name,
        "changed": record.changed,
        "touched": 0,
        "notes": record.notes,
        "done": record.done,
        "seconds": round(record.seconds, 6),
        "verify_seconds": round(record.verify_seconds, 6),
    }


def _parameters(facts: CaptureFacts, names: ParameterNames) -> tuple[ParameterRecord, ...]:
    found = {**facts.params, **facts.block_params}
    return tuple(
        ParameterRecord(
            name=names.in_model(info.name),
            shape=info.shape,
            shard_shape=info.shard_shape,
            dtype=str(info.dtype).removeprefix("torch."),
            placement=info.placement,
            requires_grad=info.requires_grad,
            is_planned=number in facts.block_params,
        )
        for number, info in sorted(found.items(), key=lambda item: item[0])
    )


def _rank_and_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun has set them
