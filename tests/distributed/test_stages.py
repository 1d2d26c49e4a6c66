"""Every stage, model and world size against one process."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import dsgraph
from dsgraph.passes.analysis.sizes import tensor_bytes
from dsgraph.passes.ir.coalesced import results_of
from dsgraph.passes.ir.collectives import collectives, is_collective
from dsgraph.passes.ir.graph import is_wait
from dsgraph.tools.reporting.traffic import graph_traffic
from tests.covering import covering
from tests.distributed.training import compare, full
from tests.models import CASES
from tests.pipelines import with_buckets, without_buckets

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
WORLDS = (2, 3)

# Compiling takes most of the time: sizes that change without notice (two compiles) on 2 ranks, announced ones on 3; and
# graphs without a backward for three models.
CASES_BY_WORLD = [
    (case, world)
    for case in sorted(CASES)
    for world in WORLDS
    if "dynamic" not in case or world == (3 if "marked" in case else 2)
]
ALSO_EVALUATED = ("gpt", "graph_break", "uneven")


def _compare(case: str, bucket_bytes: int | None = None, **how: object) -> None:
    if bucket_bytes is not None:
        how["pipeline"] = with_buckets(bucket_bytes) if bucket_bytes else without_buckets()
    compare(CASES[case].build, CASES[case].batches, **how)  # type: ignore[arg-type]


# What a step depends on. Of micro-batches: how many, and what `accumulate` is told. Of buckets: how many bytes. Of
# blocks: whether equal ones are frames of their own.
WAYS = {
    "case": sorted(set(CASES) - {"dynamic_gpt", "marked_dynamic_gpt"}),
    "stage": STAGES,
    "codegen": (None, "eager"),
    "mesh": (2, 3, (1, 2), (2, 1), (2, 2)),
    "micro_batches": ((1, None), (2, None), (2, True), (2, False)),
    "bucket_bytes": (None, 0, 200, 4096),
    "blocks": ("auto", "none"),
}


def _exists(case, stage, codegen, mesh, micro_batches, bucket_bytes, blocks) -> bool:
    _, reduce_once = micro_batches
    is_accumulating_so = reduce_once is None or (stage == 2 if reduce_once else stage >= 2)
    is_compiled_so = codegen == "eager" or (bucket_bytes is None and "dynamic" not in case)
    is_on_such_a_mesh = mesh in WORLDS if case not in ("gpt", "uneven") else True
    return is_accumulating_so and is_compiled_so and is_on_such_a_mesh and ("dynamic" not in case or mesh == 2)


# Sizes that vary are compiled more than once: of those, each way by itself.
FIXED = {**WAYS, "case": [case for case in WAYS["case"] if "dynamic" not in case]}
VARYING = {**WAYS, "case": ["dynamic", "marked_dynamic"]}
# One of each kind of way: with and without replicas, micro-batches and buckets.
_KINDS = {**FIXED, "mesh": (2, 3, (2, 2)), "micro_batches": WAYS["micro_batches"][1:], "bucket_bytes": (None, 0, 200)}
# Of the model that compiles fastest, each pair of kinds; of all models, each way by itself.
_FEW = [
    *covering({**_KINDS, "case": ["uneven"]}, where=_exists),
    *covering(FIXED, strength=1, where=_exists),
    *covering({**VARYING, "stage": (1, 3)}, strength=1, where=_exists),
]
_FEW = list(dict.fromkeys(_FEW))
_ALL = [*covering(FIXED, where=_exists), *covering(VARYING, where=_exists)]


@pytest.mark.parametrize(
    tuple(WAYS),
    [*_FEW, *(pytest.param(*way, marks=pytest.mark.full) for way in _ALL if way not in _FEW)],
)
def test_each_pair_of_ways_matches_one_process(ranks, case, stage, codegen, mesh, micro_batches, bucket_bytes, blocks):
    count, reduce_once = micro_batches
    how: dict[str, object] = {"stage": stage, "codegen": codegen, "micro_batches": count, "reduce_once": reduce_once}
    how["blocks"] = blocks
    if bucket_bytes is not None:
        how["bucket_bytes"] = bucket_bytes
    if isinstance(mesh, tuple):
        how["mesh_shape"] = mesh
    steps = 3 if "dynamic" in case else 2
    ranks(mesh if isinstance(mesh, int) else mesh[0] * mesh[1]).run(_compare, case, steps=steps, **how)


# All cases on all stages; the pairs of these with everything else are above, and test_copies.py has bits compared.
@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("case", "world"), CASES_BY_WORLD)
def test_matches_one_process(ranks, case, stage, world):
    # With two ranks nothing may differ, not even a bit: a sum of two is the same in any order, and halving is exact.
    exact, evaluate = case == "gpt" and world == 2, case in ALSO_EVALUATED and world == 2
    # On three ranks each collective by itself, so that many of them are under way at once.
    buckets = {} if world == 2 else {"bucket_bytes": 0}
    ranks(world).run(_compare, case, stage=stage, exact=exact, evaluate=evaluate, **buckets)


# Of the gathered matrices of "gpt", two or three to a bucket.
BUCKET_BYTES = 4096


@pytest.mark.full  # covered by pairs above
@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
def test_buckets_match_one_process(ranks, world):
    ranks(world).run(_compare, "gpt", BUCKET_BYTES, stage=3, exact=world == 2, evaluate=True)
    ranks(world).run(_compare, "uneven", 200, stage=3)


@pytest.mark.full  # covered by pairs above
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_matches_one_process(ranks, stage, world):
    ranks(world).run(_compare, "gpt", stage=stage, micro_batches=4)


@pytest.mark.full  # covered by pairs above
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mesh_shape", [(2, 1), (1, 2), (3, 1), (1, 3)])
def test_hybrid_mesh_matches_one_process(ranks, stage, mesh_shape):
    ranks(max(mesh_shape)).run(_compare, "uneven", stage=stage, mesh_shape=mesh_shape)


@pytest.mark.full  # covered by pairs above
@pytest.mark.parametrize("stage", STAGES)
def test_two_by_two_mesh_matches_one_process(ranks, stage):
    ranks(4).run(_compare, "uneven", stage=stage, mesh_shape=(2, 2), micro_batches=2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", sorted(name for name in CASES if "dynamic" not in name))
def test_uncompiled_model_matches_one_process(ranks, case, stage):
    ranks(2).run(_compare, case, stage=stage, codegen=None, exact=case == "gpt", evaluate=True)


@pytest.mark.full  # several buckets under Inductor follow
@pytest.mark.inductor
@pytest.mark.parametrize(("case", "stage"), [("graph_break", 1), pytest.param("uneven", 3, marks=pytest.mark.full)])
def test_inductor_matches_one_process(ranks, case, stage):
    ranks(2).run(_compare, case, stage=stage, codegen="inductor")


@pytest.mark.full  # the layers of few kernels follow
@pytest.mark.inductor
def test_inductor_with_several_buckets_matches_one_process(ranks):
    ranks(2).run(_compare, "uneven", 200, stage=3, codegen="inductor")


class _Layers(nn.Module):
    """Few kinds of kernels, so that compiling them does not take long."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def _compare_layers() -> None:
    batches = lambda step, rank: (torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank)),)  # noqa: E731
    how = {"pipeline": with_buckets(2 * 32 * 32 * 4), "blocks": "none", "steps": 2}
    compare(_Layers, batches, stage=3, codegen="inductor", **how)


@pytest.mark.inductor
def test_inductor_with_buckets_of_layers_matches_one_process(ranks):
    ranks(2).run(_compare_layers)


def _travelling(bucket_bytes: int) -> list[tuple[int, int, float, int, bool]]:
    """Return for each graph the numbers of collectives, tensors and bytes, the largest buffer, and if the loss is
    right."""
    found = []

    @dsgraph.graph_pass(phase="forward")
    def note_forward(gm, ctx):
        started = collectives(gm)
        sizes = [[tensor_bytes(result.meta["val"]) for result in results_of(node)] for node in started]
        sent = sum(traffic.sent_bytes for traffic in graph_traffic(gm, ctx.axes))
        largest = max(sum(bucket) for bucket in sizes)
        alone = all(len(bucket) == 1 for bucket in sizes if sum(bucket) == largest)
        found.append((len(started), sum(map(len, sizes)), sent, largest, alone))
        return 0

    @dsgraph.graph_pass(phase="backward")
    def note_backward(gm, ctx):
        return note_forward.run(gm, ctx)

    model = dsgraph.partition(CASES["gpt"].build(), stage=3, keep_whole_below=12)
    pipeline = (with_buckets(bucket_bytes) if bucket_bytes else without_buckets()) + [note_forward, note_backward]
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline})
    compiled(*CASES["gpt"].batches(0, 0)).backward()
    return found


@pytest.mark.full  # tests/passes/overlap has the buckets of small graphs
def test_buckets_are_fewer_collectives_of_as_many_bytes(ranks):
    apart, together = ranks(2).run(_travelling, 0)[0], ranks(2).run(_travelling, BUCKET_BYTES)[0]
    for (alone, tensors, sent, _, _), (buckets, same_tensors, same_sent, largest, is_alone) in zip(
        apart, together, strict=True
    ):
        assert alone == tensors == same_tensors
        assert 1 < buckets < alone
        assert same_sent == sent
        assert largest <= BUCKET_BYTES or is_alone


def _restart(cache: str) -> tuple[int, int]:
    """One step of a model whose ranks hold different numbers of rows; returns hits of torch's two caches."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    counters.clear()
    try:
        torch.manual_seed(0)
        model = dsgraph.partition(nn.Linear(4, 13, bias=False), stage=3, keep_whole_below=0)
        x = torch.randn(2, 4)
        y = torch.compile(model, backend="dsgraph")(x)
        y.sum().backward()
        torch.testing.assert_close(y, x @ full(model._parameters["weight"]).t())
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    return counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.full  # tests/compiler/test_backend.py starts warm on one rank
@pytest.mark.inductor
def test_a_warm_start_gives_no_rank_the_graph_of_another(ranks, tmp_path):
    cold = ranks(2).run(_restart, str(tmp_path))
    warm = ranks(2).run(_restart, str(tmp_path))
    assert cold == [(0, 0), (0, 0)]
    if torch.__version__ >= "2.12":  # 2.11 hashes DTensors anew in every process
        assert [aot for aot, _ in warm] == [1, 1]


COLLECTIVES = re.compile(r"torch\.ops\.(?:_c10d_functional|dsgraph)\.(\w+)\.default\(")


def _compare_order(bucket_bytes: int) -> None:
    """Inductor must not move collectives past one another, nor waits back to where they overlap with nothing."""
    expected: list[list[str]] = []

    @dsgraph.graph_pass(phase="forward")
    def note_forward(gm, ctx):
        calls = [node for node in gm.graph.nodes if is_collective(node) or is_wait(node)]
        expected.append([node.target._schema.name.split("::")[1] for node in calls])
        return 0

    @dsgraph.graph_pass(phase="backward")
    def note_backward(gm, ctx):
        return note_forward.run(gm, ctx)

    model = dsgraph.partition(_Layers(), stage=3, keep_whole_below=0)
    pipeline = (with_buckets(bucket_bytes) if bucket_bytes else without_buckets()) + [note_forward, note_backward]
    compiled = torch.compile(model, backend="dsgraph", options={"pipeline": pipeline})

    def step():
        compiled(torch.randn(4, 32)).backward()

    _, sources = run_and_get_code(step)
    found = [COLLECTIVES.findall(source) for source in sources]
    ending = "_coalesced" if bucket_bytes else ""
    kinds = {f"gather_by_messages{ending}", f"exchange_by_messages{ending}"}
    assert found == expected and kinds <= {*found[0], *found[1]}


@pytest.mark.full  # the verifier compares the order, and blocking order is tried in tests/passes/overlap
@pytest.mark.inductor
@pytest.mark.parametrize("bucket_bytes", [pytest.param(0, marks=pytest.mark.full), 2 * 32 * 32 * 4])
def test_inductor_keeps_the_order_of_collectives(ranks, bucket_bytes):
    ranks(2).run(_compare_order, bucket_bytes)
