"""Memory of one rank of a layout, read off graphs that were captured and compiled for it. Nothing is computed.

A stage of one layer and one of two layers are compiled. All further layers are like the second one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from dsgraph.compiler.backend import Backend
from dsgraph.parallel.planning.gpus import NodeGpu
from dsgraph.parallel.planning.layout import ModelShape, RankLayout, TrainingSetup
from dsgraph.parallel.planning.layout_plan import plan
from dsgraph.partitioning.partition import partition
from dsgraph.passes.analysis.pair_memory import PairMemory
from dsgraph.passes.analysis.states import shard_bytes
from dsgraph.passes.analysis.step_memory import simulate_step
from dsgraph.tools.emission.harness import fake_ranks
from dsgraph.tools.reporting.report_observer import ReportObserver
from dsgraph.utils.errors import LayoutError

_DROPOUT = 0.1


class Attention(nn.Module):
    """Causal attention.

    The number of heads follows from the width of its products, which may be a tensor-parallel shard.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor, later: Tensor) -> Tensor:
        """Map [batch, time, hidden] to the same shape. `later`: [time, time] bool, what a token must not see."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.size)
        shares = F.dropout(scores.masked_fill(later, -math.inf).softmax(-1), _DROPOUT, self.training)
        return self.out((shares @ value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A pre-norm layer with a feed-forward part of four times its width."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, later: Tensor) -> Tensor:
        """Map [batch, time, hidden] to the same shape. `later`: see `Attention`."""
        x = x + F.dropout(self.attention(self.attention_norm(x), later), _DROPOUT, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.feed_forward_norm(x)))), _DROPOUT, self.training)


class Stage(nn.Module):
    """The layers of one stage of a pipeline, without embeddings and head."""

    def __init__(self, hidden: int, heads: int, *, layers: int, checkpointing: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, time, hidden] to the same shape."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            x = checkpoint(layer, x, later, use_reentrant=False) if self.checkpointing else layer(x, later)
        return x


_HALF = torch.bfloat16
_ADAM_AVERAGES = 2  # each with the shape and the dtype of its parameter


@dataclass(frozen=True)
class Holding:
    """Bytes that a rank holds of a stage.

    Attributes:
        parameters: Gathered copies in half precision, of stages 1 and 2. Stages 0 and 3 make them at each use.
        gradients: When the backward is over.
        optimizer: The parameters that it steps on, in float32, and Adam's averages.
        saved: Of one micro-batch, between its forward and its backward.
        buffers: Temporary tensors of a micro-batch: the part of a step's peak that is none of the above.
        nodes: Of the forward and the backward.
        seconds: To capture and compile them.
    """

    parameters: float
    gradients: float
    optimizer: float
    saved: float
    buffers: float
    nodes: int
    seconds: float


@dataclass(frozen=True)
class CapturedLayout:
    """The results of compiling.

    Attributes:
        one: Of a stage of one layer.
        two: Of a stage of two layers.
    """

    one: Holding
    two: Holding

    def layer(self, part: str) -> float:
        """Return the bytes that one more layer adds."""
        return float(getattr(self.two, part) - getattr(self.one, part))


def capture(model: ModelShape, layout: RankLayout, training: TrainingSetup) -> CapturedLayout:
    """Capture and compile stages of one and of two layers for one rank of a layout.

    Raises:
        LayoutError: The memory of this machine does not take the parameters of two layers.
    """
    return CapturedLayout(*(_hold(model, layout, training, layers=layers) for layers in (1, 2)))


class _Compiled(BaseException):
    """Ends the forward after its compilation."""


def _hold(model: ModelShape, layout: RankLayout, training: TrainingSetup, *, layers: int) -> Holding:
    started = time.perf_counter()
    torch.compiler.reset()
    reports = ReportObserver()
    backend = Backend(observers=[reports])

    def compile_alone(gm: GraphModule, inputs: Sequence[Any]) -> NoReturn:
        backend(gm, inputs, options={"codegen": "eager"})
        raise _Compiled

    compile_alone.__name__ = backend.__name__  # by which the seam knows whose graphs may read gathered copies
    with fake_ranks(layout.tp * layout.dp):
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
        stage = _unwritten(Stage(model.hidden, model.heads, layers=layers, checkpointing=training.checkpointing))
        partition(stage, mesh["dp"], stage=training.zero_stage, param_dtype=_HALF, reduce_dtype=_HALF)
        x = torch.zeros(training.micro_batch, model.seq, model.hidden, dtype=_HALF, requires_grad=True)
        with suppress(_Compiled):
            torch.compile(stage, backend=compile_alone, fullgraph=True)(x)
        (entry,) = reports.log.of(list(stage.modules()))
    assert entry.memory is not None
    nodes = sum(graph.nodes for graph in entry.graphs)
    return _holding(entry.memory, nodes=nodes, seconds=time.perf_counter() - started)


def _unwritten(stage: nn.Module) -> nn.Module:
    """Return the stage with parameters that have addresses but no pages: memory that nobody writes to is not allocated.

    Raises:
        LayoutError: There are not even addresses.
    """
    try:
        return stage.to_empty(device="cpu")
    except RuntimeError as error:
        raise LayoutError(f"compile: this machine does not take the parameters of two layers ({error})") from None


def _holding(memory: PairMemory, *, nodes: int, seconds: float) -> Holding:
    step = simulate_step([memory], optimizer_state=0)
    held, gradients = (step.phases[-1].composition[part] for part in ("parameters", "gradients"))
    shards = sum(map(shard_bytes, memory.params.values()))
    saved = memory.forward.bytes_of(memory.saved - memory.random_states)  # a GPU's generator state is 16 bytes
    given, peak = step.phases[0].bytes - held, step.at_peak.composition
    return Holding(
        parameters=held - shards,
        gradients=gradients,
        optimizer=shards + _ADAM_AVERAGES * shards,
        saved=saved,
        buffers=peak["communication"] + peak["other"] - given,
        nodes=nodes,
        seconds=seconds,
    )


PARTS = ("parameters", "gradients", "optimizer", "model_states", "activations", "buffers", "total")
"""Names of the parts in `Comparison.captured` and `Comparison.formula`, in the order in which they are printed."""


@dataclass(frozen=True)
class Comparison:
    """The memory that a GPU holds for its layers, captured and by the formulas.

    Attributes:
        captured: Bytes by `PARTS`.
        formula: The same.
        layers: Layers of a stage, if they could be divided evenly.
        of: What was compiled.
    """

    captured: Mapping[str, float]
    formula: Mapping[str, float]
    layers: float
    of: CapturedLayout


def compare(model: ModelShape, layout: RankLayout, training: TrainingSetup, *, gpu: NodeGpu) -> Comparison:
    """Capture a stage of a layout, and compare what it holds with what the formulas say of it.

    Embeddings and head are left out on both sides, and the formulas count the parameters that such layers have.

    Raises:
        LayoutError: See `capture`, and `plan`; or the layout is tensor-parallel, which cannot be compiled together with
            ZeRO yet.
    """
    if layout.tp > 1:
        raise LayoutError(
            f"--compile: tp is {layout.tp}, and --compile does not support tensor parallelism yet: use tp 1"
        )
    layers_alone = replace(model, params=12 * model.layers * model.hidden**2, vocab=1)
    planned = plan(layers_alone, layout, training, gpu=gpu, gpus=layout.gpus)
    found = capture(model, layout, training)
    layers = model.layers / layout.pp
    captured = {part: layers * found.layer(part) for part in ("parameters", "gradients", "optimizer")}
    in_flight = min(layout.pp, planned.values["micro_batches"])
    formula = dict(planned.even)
    formula["buffers"] = planned.values["working_memory"] + planned.values["layer_buffers"]
    captured["activations"] = layers * in_flight * found.layer("saved")
    captured["buffers"] = found.two.buffers
    for held in (captured, formula):
        held["model_states"] = held["parameters"] + held["gradients"] + held["optimizer"]
        held["total"] = held["model_states"] + held["activations"] + held["buffers"]
    return Comparison(captured, formula, layers, found)
