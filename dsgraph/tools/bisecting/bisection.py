"""Finds the first pass, and the first node, after which a graph no longer computes what was captured.

`dsgraph bisect` sets DSGRAPH_BISECT to a folder; the backend then hands each captured graph to a `Bisection`
(`choice.py`).
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from dsgraph.compat.dynamo import source_name
from dsgraph.compiler.codegen import Compilation, unidentified
from dsgraph.compiler.request import CompileOutcome, CompileRequest
from dsgraph.passes import CaptureFacts, GraphPass, Phase, Pipeline
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker, placeholders
from dsgraph.utils.errors import OptionError, RanksDisagreeError, on_one_line
from dsgraph.utils.files import write_whole

from .first_node import NodeComparison, WatchedGraph, where
from .recorded_call import RecordedCall, Tolerance, Values, compare

SETTINGS = "settings.json"
"""The file of the folder that holds the tolerance: `{"rtol": 1e-5, "atol": null}`."""

FORMAT = "dsgraph-bisect"
_NAMED_AT_MOST = 10


@dataclass
class _Version:
    """The captured graph, compiled in one of several ways."""

    name: str
    phase: str
    codegen: str
    compiled: Callable[..., Any] | None = None
    graphs: list[WatchedGraph] = field(default_factory=list)
    problem: str = ""  # why it could not be compiled
    collectives: list[str] | None = None

    def watched(self, gm: GraphModule) -> Callable[..., Any]:
        self.graphs.append(WatchedGraph(gm))
        return self.graphs[-1]


class Bisection:
    """One captured graph, compiled with ever more of the passes, and compared with itself without any.

    The reference is codegen "eager" without passes. At the first calls of the graph each version runs on copies of the
    inputs, with the same random numbers and cotangents; then the reference runs for the program. All ranks run the same
    versions in the same order, and stop together after the first that is off on one of them.
    """

    awaits_copies = False

    def __init__(self, folder: Path, request: CompileRequest) -> None:
        settings = folder / SETTINGS
        self._tolerance = Tolerance(**json.loads(settings.read_text())) if settings.is_file() else Tolerance()
        self._request = replace(request, module=None, inputs=())  # the graph must not keep the model
        self._versions: list[_Version] = []
        self._may_stop = True
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._folder = folder / f"rank{rank}"
        self._result: dict[str, Any] = {"format": FORMAT, "version": 1, "rank": rank, "world": world}

    @property
    def outcome(self) -> CompileOutcome:
        """The outcome of the reference, which the program runs: it contains no passes."""
        return CompileOutcome(unidentified=unidentified(self._request.options, self._request.pipeline))

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile all versions; the result compares them at its first call, and computes what the reference does.

        Ranks meet to compare. A graph that communicates like one before may be compiled by some of them alone, and is
        not bisected.

        Raises:
            OptionError: Parameters of the graph are on disk.
            RuntimeError: The graph cannot be compiled even without passes.
        """
        if any(info.tier for info in self._request.facts.params.values()):
            raise OptionError(
                "dsgraph bisect runs a graph several times, and parameters on disk change in each backward: take "
                "'parameters' out of partition(offload=...) (in the engine, offload_param)"
            )
        if not self._request.is_new:
            return self._compile_reference(gm, inputs)
        self._begin(gm)
        names = _input_names(gm, self._request.facts)
        run_reference = self._compile_reference(gm, inputs)
        planned = list(self._planned())
        for number, (version, pipeline) in enumerate(planned, start=1):
            self._tell(f"compiling {number} of {len(planned)}, {version.phase} {version.name}")
            self._compile(version, pipeline, gm, inputs)
            self._versions.append(version)
            if version.problem:
                break  # so has every longer pipeline

        def run(*args: Any) -> Any:
            if self._versions:
                self._examine(RecordedCall(args, names))
                self._versions = []
            return run_reference(*args)

        return run

    def _compile_reference(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        reference = _Version("", "", "eager")
        self._compile(reference, Pipeline(), gm, inputs)
        if reference.compiled is None:
            raise RuntimeError(f"bisect: the graph cannot be compiled even without passes: {reference.problem}")
        self._versions = [reference]
        return reference.compiled

    def _begin(self, gm: GraphModule) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        first = next((node for node in gm.graph.nodes if where(node)[0]), None)
        communicates = any(
            is_collective(node) or is_gather_marker(node)
            for module in all_graph_modules(gm)
            for node in module.graph.nodes
        )
        # Without an agreement ranks cannot stop together, so they must all run everything.
        self._may_stop = self._request.agreement is not None or not communicates
        self._result |= {
            "graph": len(list(self._folder.glob("graph*.json"))) + 1,
            "where": where(first)[0] if first is not None else "",
            "blocks": self._request.unit.blocks,
            "training": torch.is_grad_enabled(),
            "called": False,
            "steps": [],
            "first": None,
        }
        self._write()

    def _planned(self) -> Iterator[tuple[_Version, Pipeline]]:
        passes: tuple[GraphPass, ...] = self._request.pipeline.passes
        for count, item in enumerate(passes, start=1):
            yield _Version(item.name, item.phase.value, "eager"), Pipeline(passes[:count])
        codegen = self._request.options.codegen
        if codegen != "eager":
            yield _Version(codegen, "codegen", codegen), self._request.pipeline

    def _compile(self, version: _Version, pipeline: Pipeline, gm: GraphModule, inputs: Sequence[Any]) -> None:
        changes: dict[str, Any] = {"codegen": version.codegen, "dump": None}
        if version.codegen == "eager":
            changes["inductor"] = {}
        else:  # so that it draws the random numbers that the reference draws
            changes["inductor"] = {"fallback_random": True, **self._request.options.inductor}
        compilation = Compilation(
            self._request.options.model_copy(update=changes),
            self._request.facts,
            pipeline,
            mode=None if version.codegen == "eager" else self._request.mode,
            boxed=version.watched,
        )
        try:
            version.compiled = compilation.compile(copy.deepcopy(gm), inputs)
        except Exception as error:
            version.problem = on_one_line(error)
        failed = self._say("whether they could compile", version.problem)
        if failed:
            rank, problem = next(iter(failed.items()))
            version.problem = version.problem or f"{problem} (on rank {rank})"
            version.compiled = None
        elif self._request.agreement is not None:
            try:
                self._request.agreement.confirm("run different collectives", compilation.collectives)
            except RanksDisagreeError as error:  # raised on all of them
                version.problem, version.compiled = on_one_line(error), None

    def _examine(self, replay: RecordedCall) -> None:
        """Run all versions on one call's inputs, until one is off."""
        self._result["called"] = True
        reference, *versions = self._versions
        assert reference.compiled is not None
        expected = replay.run(reference.compiled)
        repeated = _Version("the reference once more", "", "eager", compiled=reference.compiled)
        good = reference
        for version in [repeated, *versions]:
            step = self._step(version, replay, expected)
            states = self._say("how a version of a graph did", "" if step["state"] == "ok" else step["state"])
            if version is not repeated:
                self._result["steps"].append(step)
            if states and self._result["first"] is None:
                node = None
                if version.graphs and "failed" not in states.values() and self._may_stop:
                    node = self._search(good, version, replay)
                about = {key: step[key] for key in ("pass", "phase", "codegen")}
                self._result["first"] = {**about, "ranks": sorted(states), "node": node}
                self._result["unrepeatable"] = version is repeated
            if states and self._may_stop:
                break
            good = version if version is not repeated else reference
        self._write()

    def _step(self, version: _Version, replay: RecordedCall, expected: Values) -> dict[str, Any]:
        """Run one version; what came of it, as it is written down."""
        step: dict[str, Any] = {"pass": version.name, "phase": version.phase, "codegen": version.codegen}
        if version.compiled is None:
            return {**step, "state": "failed", "problem": version.problem}
        try:
            found = replay.run(version.compiled)
        except Exception as error:
            return {**step, "state": "failed", "problem": on_one_line(error)}
        differences = compare(expected, found, self._tolerance)
        off = {name: apart for name, apart in differences.items() if apart.is_off}
        shown = off or differences
        worst = max(shown, key=lambda name: _badness(shown[name]), default=None)
        return {
            **step,
            "state": "off" if off else "ok",
            "off": [{"what": name, **asdict(apart)} for name, apart in list(off.items())[:_NAMED_AT_MOST]],
            "count_off": len(off),
            "count": len(differences),
            "worst": None if worst is None else {"what": worst, **asdict(shown[worst])},
        }

    def _search(self, before: _Version, after: _Version, replay: RecordedCall) -> dict[str, Any] | None:
        retraced = after.phase == Phase.CAPTURE.value
        parting = NodeComparison(before.graphs, after.graphs, retraced, self._tolerance)
        run_before, run_after = before.compiled, after.compiled
        assert run_before is not None and run_after is not None
        parting.watch_before(lambda: replay.run(run_before))
        parting.watch_after(lambda: replay.run(run_after))
        finding = parting.describe()
        return None if finding is None else asdict(finding)

    def _tell(self, what: str) -> None:
        if self._result["rank"] == 0:
            print(f"dsgraph bisect: graph {self._result['graph']}, {what}", file=sys.stderr, flush=True)

    def _say(self, what: str, text: str) -> dict[int, str]:
        """Return rank -> text, for the ranks that have a text to report."""
        if self._request.agreement is None:
            return {self._result["rank"]: text} if text else {}
        return {rank: words for rank, words in self._request.agreement.exchange(what, text).items() if words}

    def _write(self) -> None:
        path = self._folder / f"graph{self._result['graph']}.json"
        write_whole(path, json.dumps(self._result, indent=1).encode())


def _badness(apart: Any) -> float:
    if apart.largest is None or apart.note:
        return float("inf")
    return float(apart.largest / apart.allowed) if apart.allowed else float("inf" if apart.largest else 0.0)


def _input_names(gm: GraphModule, facts: CaptureFacts) -> list[str]:
    """Return the user's names of the captured graph's inputs (`block.weight`, `tokens`); no name occurs twice."""
    names: list[str] = []
    for number, node in enumerate(placeholders(gm)):
        source = source_name(node)
        attribute = ".".join(re.findall(r"_(?:modules|parameters|buffers)\['([^']*)'\]", source))
        local = re.fullmatch(r"L\['(\w+)'\]", source)
        role = facts.roles[number]
        name = role.model_name or role.parameter or attribute or (local[1] if local else node.name)
        names.append(name if name not in names else node.name)
    return names
