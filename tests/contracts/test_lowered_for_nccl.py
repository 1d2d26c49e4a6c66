"""Graphs as they go to Inductor on a GPU with NCCL: what they may not hold, which a CPU with gloo would run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

import dsgraph
from dsgraph.passes.ir.collectives import TABLE
from dsgraph.passes.ir.graph import all_graph_modules
from dsgraph.passes.kernels.registry import KERNELS
from dsgraph.tools.emission import harness
from dsgraph.tools.emission.emission import SETTINGS, Emission
from dsgraph.tools.emission.operators import refuse_cpu_operators
from examples.gpt import GPT, GPTConfig

pytestmark = pytest.mark.inductor  # traces for it

NCCL = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
# Ops whose result, or its shape, the host must know before it goes on.
WAITS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "unique", "_unique2", "unique_dim")
GPT_CONFIG = GPTConfig(vocab=64, width=64, heads=2, layers=2, dropout=0.1)


@dataclass
class Lowered:
    """The graphs of a training step, by their phases.

    Attributes:
        graphs: "forward", "backward" or "inference", and a graph after all passes.
        problems: Why a graph could not be traced.
    """

    graphs: list[tuple[str, GraphModule]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        """Return the calls of all graphs."""
        modules = [module for _, graph in self.graphs for module in all_graph_modules(graph)]
        return [node for module in modules for node in module.graph.nodes if node.op == "call_function"]


def _train(*, stage: int = 3, evaluates: bool = False, **options: Any) -> None:
    model = GPT(GPT_CONFIG)
    dsgraph.partition(model, stage=stage, keep_whole_below=0, param_dtype=torch.bfloat16, blocks="none")
    compiled = torch.compile(model, backend="dsgraph", options=options)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with torch.no_grad() if evaluates else nullcontext():
        loss: Tensor = compiled(tokens, tokens)
    if not evaluates:
        loss.backward()


def _train_by_engine(**section: Any) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **section,
    }
    engine, *_ = dsgraph.initialize(model=torch.nn.Linear(16, 16), config=config)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()
    engine.close()


_ONE_BIT = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}}
_QUANTIZED = {
    "enabled": True,
    "quantize_bits": {"start_bits": 5, "target_bits": 3},
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 0},
}
CASES: dict[str, Callable[[], None]] = {
    "stage 3, activations on the host": lambda: _train(activation_offload="host"),
    "stage 1, sparse attention": lambda: _train(stage=1, sparse_attention={"mode": "fixed", "block": 16}),
    "evaluation": lambda: _train(evaluates=True, kernels=[spec.name for spec in KERNELS]),
    "OneBitAdam": lambda: _train_by_engine(**_ONE_BIT),
    "quantize_training": lambda: _train_by_engine(quantize_training=_QUANTIZED, zero_optimization={"stage": 3}),
}


@pytest.fixture(scope="module")
def lowered(tmp_path_factory) -> Iterator[dict[str, Lowered]]:
    """Each case's graphs for one GPU of eight."""
    folder = tmp_path_factory.mktemp("emit")
    (folder / SETTINGS).write_text(json.dumps({"archs": ["sm_90"], "out": str(folder / "out")}))
    found = {case: Lowered() for case in CASES}
    with pytest.MonkeyPatch.context() as patch, harness.fake_ranks(8):
        patch.setenv("DSGRAPH_EMIT", str(folder))
        dist.init_process_group("nccl")
        for case, run in CASES.items():
            graphs, problems = found[case].graphs, found[case].problems
            patch.setattr(Emission, "_emit", lambda self, gm, _, *, phase, into=graphs, **__: into.append((phase, gm)))
            patch.setattr(Emission, "_write", lambda self, record, into=problems: into.append(record.problem))
            torch._dynamo.reset()
            torch.manual_seed(0)
            run()
        yield found


@pytest.fixture(params=CASES)
def graphs(request, lowered) -> Lowered:
    """The graphs of one case."""
    case: Lowered = lowered[request.param]
    assert case.problems == [] and case.nodes()
    return case


def test_they_hold_no_op_by_messages(graphs):
    assert [str(node.target) for node in graphs.nodes() if "_by_messages" in str(node.target)] == []


def test_collectives_send_dtypes_that_nccl_knows(graphs):
    sent = {
        (str(node.target), value.dtype)
        for node in graphs.nodes()
        if node.target in TABLE.by_op
        for value in pytree.tree_leaves([argument.meta.get("val") for argument in node.all_input_nodes])
        if isinstance(value, Tensor)
    }
    assert {name for name, dtype in sent if dtype not in NCCL} == set()


def test_no_op_waits_for_the_host(graphs):
    names = {node.target.__name__.partition(".")[0]: node for node in graphs.nodes()}
    assert {name: node.format_node() for name, node in names.items() if name in WAITS} == {}


def test_each_op_has_a_kernel_for_cuda(graphs):
    refuse_cpu_operators(graphs.nodes())


# Case -> an op without which it would not show what it is for.
EXPECTED = {
    "stage 3, activations on the host": "dsgraph.finish_offload",
    "stage 1, sparse attention": "dsgraph.block_sparse_attention_backward",
    "evaluation": "_c10d_functional.all_gather_into_tensor_coalesced",
    "OneBitAdam": "dsgraph.compress_momentum",
    "quantize_training": "aten.round",
}


def test_the_cases_hold_what_they_are_for(lowered):
    for case, expected in EXPECTED.items():
        assert f"{expected}.default" in {str(node.target) for node in lowered[case].nodes()}, case
