"""Accumulated gradients that graphs reduce in the last micro-batch's backward: each exactly once, whatever it runs.

Weights and batches are small integers, so that sums are exact in any order: one that is lost or added twice shows.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsgraph
from benchmarks.wire import record_collectives
from dsgraph.compiler.captured_sums import add_sums
from dsgraph.partitioning.accumulation.watched_graphs import withhold_sum
from dsgraph.passes.kernels.substitute_kernels import SubstituteKernels
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from dsgraph.passes.zero.merge_gathers import MergeGathers
from tests.distributed.training import compare, full
from tests.models import CASES, build, tokens
from tests.pipelines import without_buckets

pytestmark = pytest.mark.distributed

STAGES = ((0, None), (1, None), (2, True))


def _integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


class Product(nn.Module):
    """`x` times `a`, `b` and `c`, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.a, self.b, self.c = (nn.Parameter(_integers(4, 4, seed=seed)) for seed in range(3))

    def forward(self, x: Tensor, way: str | None = None) -> Tensor:
        return getattr(self, way or self.way)(x).sum()

    def plain(self, x: Tensor) -> Tensor:
        return x @ self.a @ self.b @ self.c

    def without_c(self, x: Tensor) -> Tensor:
        return x @ self.a @ self.b

    def c_twice(self, x: Tensor) -> Tensor:
        return x @ self.c @ self.b @ self.c

    def two_graphs(self, x: Tensor) -> Tensor:
        h = x @ self.a @ self.b
        torch._dynamo.graph_break()
        return h @ self.a @ self.c

    def regions(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda h: h @ self.a @ self.b, x, use_reentrant=False)
        return checkpoint(lambda h: h @ self.a @ self.c, h, use_reentrant=False) @ self.a

    def nested_regions(self, x: Tensor) -> Tensor:
        inner = lambda h: checkpoint(lambda g: g @ self.a, h @ self.b, use_reentrant=False)  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False) @ self.c @ self.a

    def without_gradient(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = x @ self.a
        return h @ self.b @ self.a @ self.c.detach()

    def eager_part(self, x: Tensor) -> Tensor:
        h = self.eagerly(x @ self.a @ self.b)
        return h @ self.a @ self.b

    @torch.compiler.disable
    def eagerly(self, h: Tensor) -> Tensor:
        return h @ self.a @ self.c

    def shard(self, x: Tensor) -> Tensor:
        """The gradient of `a` goes past the seam, and that of the marker is cut off."""
        a: Any = self._parameters["a"]
        local = a.to_local() if isinstance(a, torch.distributed.tensor.DTensor) else a
        return (x @ self.a.detach() @ self.b @ self.c).sum() + local.sum()


WAYS = tuple(name for name in vars(Product) if not name.startswith("_") and name not in ("forward", "eagerly"))


def _batch(micro: int, rank: int) -> Tensor:
    return _integers(3, 4, seed=100 + 10 * micro + rank)


def _partitioned(way: str, stage: int, **how: Any) -> nn.Module:
    return dsgraph.partition(Product(way), stage=stage, keep_whole_below=0, **how)


def _compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="dsgraph", options={"codegen": "eager", **options})


def _check(model: nn.Module, ways: list[str], scale_last: float = 1.0) -> None:
    """Gradients of micro-batches that went these ways, against those of one process with all batches."""
    world, alone = dist.get_world_size(), Product("")
    for rank in range(world):
        for micro, way in enumerate(ways):
            scale = scale_last if micro == len(ways) - 1 else 1.0
            (scale * alone(_batch(micro, rank), way)).backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            assert torch.equal(full(mine.grad), theirs.grad / world), name


def _accumulate(model: nn.Module, runs: Any, ways: list[str], reduce_once: bool | None) -> None:
    """All micro-batches but the last."""
    for micro, way in enumerate(ways[:-1]):
        with dsgraph.accumulate(model, reduce_once=reduce_once):
            runs(_batch(micro, dist.get_rank()), way).backward()


def _step(stage: int, reduce_once: bool | None, ways: list[str], options: dict[str, Any]) -> dict[str, int]:
    """Two steps; returns how many messages and all-reduces the last micro-batch of the second took."""
    model = _partitioned(ways[-1], stage)
    runs = _compiled(model, **options)
    for _ in range(2):
        for param in model.parameters():
            param.grad = None
        _accumulate(model, runs, ways, reduce_once)
        last = (_batch(len(ways) - 1, dist.get_rank()), ways[-1])
        ops = [collective.op for collective in record_collectives(lambda last=last: runs(*last).backward())]
        _check(model, ways)
        assert not any(entry.is_summed for entry in model._dsgraph.partition.parameters)
    return {"messages": ops.count("send"), "all_reduces": ops.count("allreduce_")}


@pytest.mark.covering(1)
@pytest.mark.parametrize(("stage", "reduce_once"), STAGES)
@pytest.mark.parametrize("way", WAYS)
def test_each_sum_is_reduced_once(ranks, way, stage, reduce_once):
    ranks(2).run(_step, stage, reduce_once, [way] * 3, {})


@pytest.mark.parametrize(
    "ways",
    (
        ("plain", "without_c"),
        ("without_c", "plain"),
        ("without_c", "without_c"),
        ("plain", "without_gradient"),
        ("plain", "shard"),
    ),
)
def test_parameters_that_some_micro_batches_use(ranks, ways):
    ranks(2).run(_step, 2, True, list(ways), {})


@pytest.mark.full  # codegen "eager" follows
@pytest.mark.covering(1)
@pytest.mark.inductor
@pytest.mark.parametrize("passes", ((SubstituteKernels(),), (MergeGathers(),)))
@pytest.mark.parametrize("way", ("c_twice", "regions"))
def test_so_does_inductor_with_passes_over_the_captured_graph_alone(ranks, way, passes):
    options = {"pipeline": dsgraph.Pipeline(passes), "codegen": "inductor"}
    ranks(2).run(_step, 2, True, [way] * 2, options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("passes", ((), (InsertZeroCollectives(),)))
@pytest.mark.parametrize("way", ("plain", "c_twice", "regions"))
def test_any_pipeline_adds_each_sum_once(ranks, way, passes):
    ranks(2).run(_step, 2, True, [way] * 2, {"pipeline": dsgraph.Pipeline(passes)})


def test_a_gradient_travels_once_with_its_sum(ranks):
    """And one all-reduce says that nothing is left."""
    (found, _) = ranks(2).run(_step, 2, True, ["plain"] * 2, {})
    assert found == {"messages": 3, "all_reduces": 1}
    (found, _) = ranks(2).run(_step, 2, True, ["plain", "without_c"], {})
    assert found == {"messages": 3, "all_reduces": 1}
    (found, _) = ranks(2).run(_step, 0, None, ["plain"] * 2, {})
    assert found == {"messages": 0, "all_reduces": 2}


def _order_of_a_backward() -> list[str]:
    model = dsgraph.partition(build("dynamic"), stage=2, keep_whole_below=40)  # a head, and a layer before it
    runs = _compiled(model, pipeline=without_buckets())
    for micro in range(2):
        with nullcontext() if micro else dsgraph.accumulate(model, reduce_once=True):
            loss = runs(*tokens(micro, dist.get_rank()))
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                loss.backward()
    return [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]


def test_gradients_travel_while_the_backward_computes(ranks):
    for names in ranks(2).run(_order_of_a_backward):
        starts = [number for number, name in enumerate(names) if name.startswith("dsgraph::exchange_by_messages")]
        products = [number for number, name in enumerate(names) if name == "aten::mm"]
        assert starts[0] < products[-1]


def _as_at_the_end(stage: int, reduce_once: bool | None, case: str, dtype: torch.dtype | None, codegen: str) -> None:
    """A forward inside `accumulate` reads leaves, and its backward outside reduces all sums when it is through."""
    found = []
    for at_the_end in (False, True):
        torch._dynamo.reset()
        model = dsgraph.partition(build(case), stage=stage, keep_whole_below=20, param_dtype=dtype)
        runs = _compiled(model, codegen=codegen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2 if dist.get_world_size() == 2 else 1):
            for micro in range(3):
                inside = dsgraph.accumulate(model, reduce_once=reduce_once)
                with inside if micro < 2 or at_the_end else nullcontext():
                    loss = runs(*CASES[case].batches(3 * step + micro, dist.get_rank()))
                    if micro < 2:
                        loss.backward()
            loss.backward()
            found.append({name: param.grad for name, param in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    half = len(found) // 2
    for mine, theirs in zip(found[:half], found[half:], strict=True):
        for name, grad in mine.items():
            ours, expected = grad.to_local(), theirs[name].to_local()
            assert ours.dtype is expected.dtype is torch.float32
            # gloo adds up more than two ranks in an order that depends on the place in a bucket.
            is_exact = dist.get_world_size() == 2 or grad.placements[-1].is_shard()
            close = {"rtol": 0.0, "atol": 0.0} if is_exact else {}
            torch.testing.assert_close(ours, expected, msg=lambda text, name=name: f"{name}: {text}", **close)


@pytest.mark.full  # three ranks and a smaller model follow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", (None, torch.bfloat16))
@pytest.mark.parametrize(("stage", "reduce_once"), STAGES)
def test_gradients_are_those_of_a_reduction_at_the_end(ranks, stage, reduce_once, dtype):
    ranks(2).run(_as_at_the_end, stage, reduce_once, "gpt", dtype, "eager")


@pytest.mark.full  # test_stages.py has three ranks with micro-batches
def test_so_are_those_of_three_ranks(ranks):
    ranks(3).run(_as_at_the_end, 2, True, "uneven", None, "eager")


def _compare_hybrid() -> None:
    how = {"stage": 2, "reduce_once": True, "micro_batches": 2, "steps": 2, "mesh_shape": (2, 2)}
    compare(CASES["uneven"].build, CASES["uneven"].batches, **how)


@pytest.mark.full  # test_stages.py has such a mesh with micro-batches
def test_sums_are_averaged_over_both_axes_of_a_mesh(ranks):
    ranks(4).run(_compare_hybrid)


def _compare_with_inductor() -> None:
    how = {"stage": 2, "reduce_once": True, "micro_batches": 3, "steps": 2, "evaluate": True}
    compare(CASES["gpt"].build, CASES["gpt"].batches, codegen="inductor", **how)


@pytest.mark.full  # by Inductor, on several ranks
@pytest.mark.inductor
def test_inductor_adds_sums(ranks):
    ranks(2).run(_compare_with_inductor)


def _gradients_alone(micro: int) -> list[Tensor]:
    """Return the gradients of one micro-batch of all ranks, averaged."""
    world, alone = dist.get_world_size(), Product("plain")
    for rank in range(world):
        alone(_batch(micro, rank)).backward()
    return [param.grad / world for param in alone.parameters()]


def _forwards_without_backward(last: str) -> None:
    """An evaluation, a forward whose loss is thrown away, and one whose backward comes when the step is over."""
    model, rank = _partitioned("plain", 2), dist.get_rank()
    runs = _compiled(model)
    for _ in range(2):
        _accumulate(model, runs, ["plain"] * 2, True)
        with torch.no_grad():
            runs(_batch(7, rank))
        runs(_batch(7, rank))
        late = runs(_batch(8, rank))
        with pytest.raises(dsgraph.AccumulationError, match="before the accumulated gradients were reduced"):
            torch.optim.SGD(model.parameters()).step()
        (runs if last == "compiled" else model)(_batch(1, rank)).backward()
        _check(model, ["plain"] * 2)
        for param in model.parameters():
            param.grad = None
        late.backward()
        for mine, expected in zip(model.parameters(), _gradients_alone(8), strict=True):
            assert torch.equal(full(mine.grad), expected)
            mine.grad = None


@pytest.mark.parametrize("last", ("compiled", "uncompiled"))
def test_forwards_without_a_backward_take_nothing(ranks, last):
    ranks(2).run(_forwards_without_backward, last)


def _gradients_for_the_caller() -> None:
    """Results of `torch.autograd.grad` and gradients of other tensors contain no sum, and consume none."""
    model, rank = _partitioned("plain", 2), dist.get_rank()
    runs, params = _compiled(model), list(model.parameters())
    _accumulate(model, runs, ["plain"] * 2, True)
    for grads in (
        torch.autograd.grad(runs(_batch(7, rank)), params),
        [*torch.autograd.grad(runs(_batch(7, rank)), params[:1]), None, None],
    ):
        for mine, expected in zip(grads, _gradients_alone(7), strict=True):
            assert mine is None or torch.equal(full(mine), expected)
    x = _batch(7, rank).requires_grad_()
    torch.autograd.grad(runs(x), x)
    runs(x).backward(inputs=[x])
    runs(_batch(1, rank)).backward()
    _check(model, ["plain"] * 2)


def test_gradients_that_go_elsewhere_have_no_sum(ranks):
    ranks(2).run(_gradients_for_the_caller)


class _Fails(torch.autograd.Function):
    """Whose backward fails, after that of all that read its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError("out of memory, say")


def _after_a_backward_that_failed() -> None:
    model = _partitioned("without_c", 2)
    runs, rank = _compiled(model), dist.get_rank()
    _accumulate(model, runs, ["plain", "without_c"], True)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        runs(_Fails.apply(_batch(1, rank).requires_grad_()), "without_c").backward()
    runs(torch.zeros(3, 4), "without_c").backward()
    _check(model, ["plain", "without_c"])
    assert not any(entry.is_summed for entry in model._dsgraph.partition.parameters)


def test_a_backward_that_fails_loses_nothing(ranks):
    ranks(2).run(_after_a_backward_that_failed)


def _withheld_where_a_backward_failed() -> None:
    model = _partitioned("plain", 2)
    runs, rank = _compiled(model), dist.get_rank()
    _accumulate(model, runs, ["plain", "plain"], True)
    loss = runs(_batch(1, rank), "plain")
    entry = model._dsgraph.partition.parameters[0]
    withhold_sum(entry)  # as a backward for the caller does, which then fails
    loss.backward()
    _check(model, ["plain", "plain"])
    assert entry.withheld is None


def test_what_was_withheld_by_a_backward_that_failed_is_put_back(ranks):
    ranks(2).run(_withheld_where_a_backward_failed)


def _backwards_of_one_graph() -> None:
    model, rank = _partitioned("plain", 2), dist.get_rank()
    runs = _compiled(model)
    _accumulate(model, runs, ["plain"] * 2, True)
    loss = runs(_batch(1, rank))
    loss.backward(retain_graph=True)
    loss.backward()
    _check(model, ["plain"] * 2, scale_last=2.0)
    for param in model.parameters():
        param.grad = None
    _accumulate(model, runs, ["plain"] * 2, True)
    twice = runs(_batch(1, rank)) + runs(_batch(1, rank))
    twice.backward()
    _check(model, ["plain"] * 2, scale_last=2.0)


def test_backwards_of_one_loss_add_a_sum_once(ranks):
    ranks(2).run(_backwards_of_one_graph)


def _last_run_elsewhere(how: str, stage: int, reduce_once: bool | None) -> None:
    """Compiled micro-batches, then an uncompiled one, or all with another compiler, which adds no sums."""
    model, rank = _partitioned("plain", stage), dist.get_rank()
    runs = _compiled(model) if how == "uncompiled" else torch.compile(model, backend="aot_eager")
    for _ in range(2):
        for param in model.parameters():
            param.grad = None
        _accumulate(model, runs, ["plain"] * 3, reduce_once)
        (model if how == "uncompiled" else runs)(_batch(2, rank)).backward()
        _check(model, ["plain"] * 3)
        torch.optim.SGD(model.parameters(), lr=0.0).step()


# Another compiler fetches no gathered copies.
@pytest.mark.parametrize(
    ("how", "stage", "reduce_once"), [*(("uncompiled", *stage) for stage in STAGES), ("aot_eager", 0, None)]
)
def test_a_last_micro_batch_that_runs_elsewhere(ranks, how, stage, reduce_once):
    ranks(2).run(_last_run_elsewhere, how, stage, reduce_once)


def _memory_and_compiles(dynamic: bool) -> int:
    """Four steps; returns how many graphs were compiled."""
    model, rank = _partitioned("plain", 2), dist.get_rank()
    runs = torch.compile(model, backend="dsgraph", options={"codegen": "eager"}, dynamic=dynamic)
    entries = model._dsgraph.partition.parameters
    for _ in range(4):
        for param in model.parameters():
            param.grad = None
        _accumulate(model, runs, ["plain"] * 3, True)
        sums = [weakref.ref(entry.accumulated_grad) for entry in entries]
        assert [total().nbytes for total in sums] == [64] * 3
        runs(_batch(2, rank)).backward()
        gc.collect()
        assert [total() for total in sums] == [None] * 3
        assert not any(entry.leaf.grad is not None for entry in entries)
        _check(model, ["plain"] * 3)
    return len(dsgraph.report(runs).compiles)


@pytest.mark.parametrize("dynamic", (False, True))
def test_sums_are_freed_and_nothing_is_compiled_again(ranks, dynamic):
    assert ranks(2).run(_memory_and_compiles, dynamic) == [2, 2]


def _sums_of_a_capture() -> list[tuple[int, int]]:
    """Return for each graph its number of inputs that are sums, and of markers that add them."""
    found = []

    def look(gm: Any, inputs: Any) -> Any:
        numbers = add_sums(gm, inputs)
        markers = gm.graph.find_nodes(op="call_function", target=torch.ops.dsgraph.gather_param)
        adding = [node for node in markers if node.kwargs.get("adds_sum")]
        read = [node.args[3].meta["example_value"] for node in adding]
        assert all(isinstance(size, int) for value in read for size in value.shape)
        found.append((len(numbers), len(adding)))
        return gm.forward

    for way in ("plain", "c_twice", "shard"):
        torch._dynamo.reset()
        model = _partitioned(way, 2)
        with dsgraph.accumulate(model, reduce_once=True):
            model(_batch(0, dist.get_rank())).backward()
        torch.compile(model, backend=look, fullgraph=True, dynamic=True)(_batch(1, dist.get_rank()))
    return found


def test_only_what_the_seam_alone_reads_adds_its_sum(ranks):
    assert ranks(2).run(_sums_of_a_capture)[0] == [(3, 3), (2, 3), (2, 2)]


def _notes() -> str:
    model = _partitioned("shard", 2)
    runs = _compiled(model)
    _accumulate(model, runs, ["shard"] * 2, True)
    runs(_batch(1, dist.get_rank())).backward()
    return str(dsgraph.report(runs))


def test_the_report_names_what_is_reduced_by_itself(ranks):
    assert "the accumulated gradient of parameter a is reduced separately" in " ".join(ranks(2).run(_notes)[0].split())
