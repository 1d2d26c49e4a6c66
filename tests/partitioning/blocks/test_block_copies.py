"""The memory and the values of the gathered copies of blocks."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.partitioning.blocks.block_copies import BlockCopies
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import partition_states
from dsgraph.utils.errors import PartitionError

pytestmark = pytest.mark.usefixtures("one_rank")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


class _Leaking(_Block):
    def forward(self, x: Tensor) -> Tensor:
        self.leaked = self.linear.weight.T
        return super().forward(x)


def _model(**options: Any) -> tuple[nn.Module, list[BlockCopies]]:
    torch._dynamo.reset()
    model = dsgraph.partition(nn.Sequential(_Block(), _Block(), _Block()), keep_whole_below=0, blocks="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", **options})
    return compiled, partition_states(model)[0].plan.blocks


def _bytes(block: BlockCopies) -> list[int]:
    return [entry.block_copy.untyped_storage().nbytes() for entry in block.entries if entry.block_copy is not None]


@pytest.mark.parametrize("overlap_comm", (True, False))
def test_the_option_overlap_comm_holds_for_the_plan(overlap_comm):
    model, blocks = _model(overlap_comm=overlap_comm)
    model(torch.ones(2, 8)).sum().backward()
    assert blocks[0].plan.gathers_ahead is overlap_comm


def test_records_are_printed_while_copies_have_no_memory():
    model, blocks = _model()
    loss = model(torch.ones(2, 8)).sum()
    (state,) = partition_states(model)
    assert _bytes(blocks[0]) == [0, 0] and f"name='{blocks[0].name}'" in repr((state, blocks))
    loss.backward()
    assert f"name='{blocks[0].name}'" in repr((state, blocks))


def test_only_the_last_block_has_memory_between_forward_and_backward():
    model, blocks = _model()
    for _ in range(2):
        loss = model(torch.ones(2, 8)).sum()
        held = [_bytes(block) for block in blocks]
        loss.backward()
    assert held == [[0, 0], [0, 0], [8 * 8 * 4, 8 * 4]]
    assert [_bytes(block) for block in blocks] == [[0, 0]] * 3


@pytest.mark.parametrize("fused", (True, False))
def test_an_update_between_forward_and_backward_is_the_error_of_one_process(fused):
    model, _ = _model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    model(torch.ones(2, 8)).sum().backward()
    late = model(torch.ones(2, 8)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.inductor  # whose graphs return the memory of an input
def test_a_result_of_a_graph_keeps_the_memory_that_it_shares():
    model = dsgraph.partition(nn.Sequential(_Leaking(), _Leaking()), keep_whole_below=0, blocks="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "inductor"})
    for _ in range(2):
        compiled(torch.ones(2, 8)).sum().backward()
        held = [block.leaked.untyped_storage().nbytes() for block in model]
        assert held == [8 * 8 * 4] * 2
        for block in model:
            assert torch.equal(block.leaked.T, block.linear._parameters["weight"].to_local())


def test_hooks_that_keep_what_is_saved_keep_its_memory():
    model, blocks = _model()
    weights = [block.entries[0].rows.clone() for block in blocks]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = model(torch.ones(2, 8)).sum()
    assert [any(torch.equal(x, weight) for x in kept) for weight in weights] == [False, True, True]
    loss.backward()
    assert all(torch.equal(x, x.clone()) for x in kept), "which is a segmentation fault without memory"


def _bytes_of_copies(blocks: list[BlockCopies]) -> int:
    """Return the bytes of all copies of blocks that are alive, also of those that were replaced."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and hasattr(each, "dsgraph_block")]
    tensors = [each for each in tensors if each.dsgraph_block in blocks]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def test_copies_that_hooks_do_not_keep_are_released_after_the_forward():
    model, blocks = _model()
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            loss = model(torch.ones(2, 8)).sum()
        alive = _bytes_of_copies(blocks)
        assert alive == 0
        loss.backward()


@pytest.mark.parametrize("mode", (torch.inference_mode, torch.no_grad))
def test_a_model_that_was_evaluated_first_can_be_trained(mode):
    model, _ = _model()
    with mode():
        model(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()


def test_a_step_on_parameters_that_a_backward_does_not_read_is_allowed():
    model, blocks = _model()
    optimizer = torch.optim.AdamW(model._orig_mod[0].parameters(), fused=True)
    model(torch.ones(2, 8)).sum().backward()
    late = model(torch.ones(2, 8)).sum()
    assert blocks[2].is_present
    optimizer.step()  # the input of the first block needs no gradient, so that its weight is not read
    late.backward()


def test_without_memory_nothing_is_present(monkeypatch):
    model, blocks = _model()
    model(torch.ones(2, 8)).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(ParameterState, "copy_bytes", property(_no_memory))
        with pytest.raises(RuntimeError, match="out of memory"):
            model(torch.ones(2, 8))
    assert not any(block.is_present for block in blocks)
    model(torch.ones(2, 8)).sum().backward()


def _no_memory(_: ParameterState) -> int:
    raise RuntimeError("out of memory")


def test_a_layer_that_was_replaced_is_gathered_with_its_block():
    model, _ = _model()
    plain = model._orig_mod
    model(torch.ones(2, 8)).sum().backward()
    plain[1].linear = nn.Linear(8, 8)
    dsgraph.partition(plain)
    model(torch.ones(2, 8)).sum().backward()
    blocks = partition_states(plain)[0].plan.blocks
    assert [[entry.name for entry in block.entries] for block in blocks] == [
        [f"{number}.linear.weight", f"{number}.linear.bias"] for number in range(3)
    ]
    assert plain[1].linear.weight.grad is not None


def test_a_deep_copy_has_one_record_of_operations():
    model, _ = _model()
    model(torch.ones(2, 8)).sum().backward()
    (state,) = partition_states(copy.deepcopy(model._orig_mod))
    assert state.plan.operations is state.operations
    assert all(block.plan is state.plan for block in state.plan.blocks)


def test_a_model_that_is_converted_gets_other_copies():
    model, blocks = _model()
    model.to(torch.float64)
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    assert {entry.block_copy.dtype for block in blocks for entry in block.entries} == {torch.float64}


class _Twins(nn.Module):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


@pytest.mark.parametrize("keep_whole_below", (0, 1000))
def test_gradients_have_memory_of_their_own(keep_whole_below):
    torch._dynamo.reset()
    model = nn.Sequential(_Twins(), _Twins())
    dsgraph.partition(model, keep_whole_below=keep_whole_below, blocks="auto")
    torch.compile(model, backend="dsgraph", options={"codegen": "eager"})(torch.ones(2, 8)).sum().backward()
    grads = [param.grad.to_local() for param in model.parameters()]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 4
    assert all(torch.equal(grad, torch.ones(2, 8)) for grad in grads)


def test_replaced_data_is_refused():
    model, _ = _model()
    model(torch.ones(2, 8)).sum().backward()
    weight = model._orig_mod[1].linear._parameters["weight"]
    weight.data = weight.data * 2
    with pytest.raises(PartitionError, match=r"'1\.linear\.weight': its \.data was replaced"):
        model(torch.ones(2, 8))


def test_second_derivatives_are_refused():
    model, _ = _model()
    model(torch.ones(2, 8)).sum().backward(create_graph=True)
    grads = [param.grad.to_local().square().sum() for param in model.parameters()]
    with pytest.raises((RuntimeError, NotImplementedError)):
        sum(grads).backward()
