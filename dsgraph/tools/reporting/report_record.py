"""The contents of a report, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dsgraph.tools.dumping.units import UnitRun

from .activity import Break, Fallback, PassNote, Recompile, Region
from .measure import Activations, LoweredGraph
from .predicted_memory import Memory
from .step import StepTraffic


@dataclass(frozen=True)
class Parameter:
    """A parameter of a partitioned model. Sizes in bytes, of the master dtype.

    Attributes:
        name: Its (first) name in the model.
        shape: Full shape.
        dtype: Master dtype.
        stage: ZeRO stage.
        split_over: Mesh axis over which its rows are sharded; None for a replicated one.
        averaged_over: Mesh axes over which its gradient is averaged.
        replicated_because: Why it is replicated; empty for a sharded one.
        bytes_full: All rows.
        bytes_here: The rows on this rank.
        bytes_copy: The gathered copy of stages 1 and 2, and what stage 3 holds of it now; 0 without one.
        is_held_for_step: Whether stage 3 gathers it once a step inside `accumulate`, as it has memory to spare.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stage: int
    split_over: str | None
    averaged_over: tuple[str, ...]
    replicated_because: str
    bytes_full: int
    bytes_here: int
    bytes_copy: int
    is_held_for_step: bool


@dataclass(frozen=True)
class Pass:
    """The effect of one pass on one graph."""

    phase: str
    name: str
    changed: int
    notes: tuple[str, ...]
    done: tuple[str, ...]
    seconds: float
    verify_seconds: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class Compile:
    """One compile of one captured graph.

    Attributes:
        number: Which compile of this process it was.
        function: The user's function, as `file:line (name)`.
        resumes_at: The line of the graph break that the graph follows, or None.
        kind: "training" (forward and backward), "inference", or "step" for the graph of a step.
        codegen: "inductor" or "eager".
        from_cache: True when torch's cache had the compiled graph: the passes were not run anew, so that the graphs,
            their collectives and bytes are not known.
        pass_seconds: In all passes together.
        verify_seconds: In checking the graphs between them.
        passes: What each did, in order.
        graphs: The lowered graphs, with what each sends each time it runs.
        activations: What passes from forward to backward; None where there is no backward or it is not known.
    """

    number: int
    function: str
    resumes_at: int | None
    kind: str
    codegen: str
    from_cache: bool
    pass_seconds: float
    verify_seconds: float
    passes: tuple[Pass, ...]
    graphs: tuple[LoweredGraph, ...]
    activations: Activations | None


@dataclass(frozen=True)
class ReportRecord:
    """A record of what was done to a model and what was not.

    Attributes:
        schema: Version of the keys of `to_dict()`.
        model: Class of the model.
        status: In one sentence: compiled, not yet run, not partitioned.
        stages: ZeRO stage of each partitioned part.
        mesh: Axis name -> ranks.
        costs: Says if the costs that passes decided by are measured or defaults; empty before the first compile.
        parameters: All partitioned parameters.
        compiles: Every graph that was compiled, in order.
        units: The units of a training step in order: repeated blocks with their graphs, and what is around them.
        step: What a rank sends in a training step.
        memory: What a rank is predicted to hold in one; None where it is not known.
        memory_unknown: Why it is not known; empty if it is, and if nothing has run with gradients.
        memory_limit: Bytes of the device that a step may use, the option's or the default; None without a limit.
        limit_gaps: Why a given limit cannot be promised; empty if it can.
        graph_breaks: Where Dynamo had to end a graph.
        recompiles: Functions that were compiled more than once.
        fallbacks: What does not run as compiled code.
        near_misses: Where a pass left something alone, and why.
        checkpoint_regions: Regions that were not honoured, or that Dynamo did not capture.
    """

    schema: int
    model: str
    status: str
    stages: tuple[int, ...]
    mesh: dict[str, int]
    costs: str
    parameters: tuple[Parameter, ...]
    compiles: tuple[Compile, ...]
    units: tuple[UnitRun, ...]
    step: StepTraffic
    memory: Memory | None
    memory_unknown: str
    memory_limit: int | None
    limit_gaps: tuple[str, ...]
    graph_breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    fallbacks: tuple[Fallback, ...]
    near_misses: tuple[PassNote, ...]
    checkpoint_regions: tuple[Region, ...]
