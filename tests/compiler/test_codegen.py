from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._ops import OpOverload

import dsgraph
from dsgraph.compat.inductor import inductor_settings
from tests.pipelines import without_buckets

pytestmark = pytest.mark.inductor

# What a user may have turned on for other models. Each moves, merges or replaces collectives of a graph.
TURNED_ON = {
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.enable_simple_overlap": True,
    "bucket_all_gathers_fx": "all",
    "bucket_all_reduces_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "dedup_reduce_scatters": True,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["reorder_compute_for_overlap", "sink_waits", "raise_comms"],
    "reorder_for_locality": True,
    "reorder_for_locality_in_training": True,
    "reorder_for_peak_memory": True,
}

_NOTED = re.compile(r"(_c10d_functional|dsgraph)::|aten::(mm|addmm)$")
_CALL = re.compile(r"torch\.ops\.(?:_c10d_functional|dsgraph)\.(\w+)\.default\(|extern_kernels\.(addmm|mm)\(")


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _known(settings: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name in inductor_settings()}


def _order_in_graphs(*, trains: bool, **options: object) -> tuple[list[list[str]], list[list[str]]]:
    """Collectives, waits and products of each graph, in the order after all passes and in that of Inductor's code."""
    placed: list[list[str]] = []

    @dsgraph.graph_pass(phase="forward")
    def note_forward(gm, ctx):
        schemas = [node.target._schema.name for node in gm.graph.nodes if isinstance(node.target, OpOverload)]
        placed.append([name.rpartition("::")[2] for name in schemas if _NOTED.match(name)])
        return 0

    @dsgraph.graph_pass(phase="backward")
    def note_backward(gm, ctx):
        return note_forward.run(gm, ctx)

    torch._dynamo.reset()
    model = dsgraph.partition(_Layers(), stage=3, keep_whole_below=0)
    pipeline = without_buckets() + [note_forward, note_backward]
    compiled = torch.compile(model, backend="dsgraph", options={"pipeline": pipeline, **options})

    def step() -> None:
        with torch.set_grad_enabled(trains):
            loss = compiled(torch.randn(4, 32))
        if trains:
            loss.backward()

    with config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(step)
    calls = [_CALL.findall(source[source.index("def call") :]) for source in sources]
    return placed, [["".join(names) for names in call] for call in calls]


@pytest.mark.parametrize(
    ("settings", "trains"),
    [
        pytest.param(TURNED_ON, True, id="turned on-training"),
        pytest.param({}, False, id="default-inference"),
        pytest.param({}, True, marks=pytest.mark.full, id="default-training"),
        pytest.param(TURNED_ON, False, marks=pytest.mark.full, id="turned on-inference"),
    ],
)
def test_inductor_moves_nothing_that_passes_have_placed(fake_ranks, settings, trains):
    with config.patch(_known(settings)):
        placed, found = _order_in_graphs(trains=trains)
    assert len(placed) == (2 if trains else 1)
    assert all(any("gather" in name for name in names) and "wait_tensor" in names for names in placed)
    assert found == placed


def test_an_option_of_the_model_has_the_last_word(fake_ranks):
    placed, found = _order_in_graphs(trains=True, inductor={"reorder_for_peak_memory": True})
    assert [sorted(names) for names in found] == [sorted(names) for names in placed]
    assert found != placed
