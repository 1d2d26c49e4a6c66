"""Activations that tensor-parallel ranks hold alike, saved slice by slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from dsgraph.passes.memory.partition_activations import PartitionActivations
from tests.distributed.test_tensor_parallel import DECODER
from tests.distributed.training import full

pytestmark = pytest.mark.distributed

EACH = dsgraph.default_pipeline() + PartitionActivations(least_bytes=1)


def _llama(layers: int) -> nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**DECODER, "num_hidden_layers": layers}, num_key_value_heads=4))


def _step(layers: int, shape: tuple[int, int] = (2, 8), **options: object) -> tuple[list[Tensor], list[object]]:
    """Gradients of a step, and the records of `PartitionActivations`."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = dsgraph.tensor_parallel(_llama(layers), mesh["tp"])
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", **options})
    ids = torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(0))
    loss = compiled(input_ids=ids, labels=ids).loss
    loss.backward()
    passes = [item for each in dsgraph.report(compiled).compiles for item in each.passes]
    found = [item for item in passes if item.name == "partition_activations"]
    return [loss.detach(), *(full(param.grad) for param in model.parameters())], found


def _compare(layers: int, codegen: str = "eager") -> None:
    whole, _ = _step(layers, codegen=codegen)
    split, (record,) = _step(layers, codegen=codegen, pipeline=EACH)
    assert all(torch.equal(one, other) for one, other in zip(split, whole, strict=True))
    # In each layer the inputs of both norms and what follows them; and the last norm.
    assert record.changed >= 4 * layers, record
    assert any("not proved equal" in note for note in record.notes), "slices of heads differ from rank to rank"


@pytest.mark.full  # tests/passes/memory has the pass
def test_gradients_are_the_same_bit_for_bit(ranks):
    ranks(2).run(_compare, 1)


@pytest.mark.full
@pytest.mark.inductor
def test_so_they_are_under_inductor(ranks):
    ranks(2).run(_compare, 2, codegen="inductor")


@pytest.mark.full
def test_four_ranks(ranks):
    ranks(4).run(_compare, 2)


class _SavedBytes:
    """A pass that counts the memory of what the forward saves."""

    __name__ = "count_saved"
    __closure__ = (None,)  # nothing is cached

    def __init__(self) -> None:
        self.found = 0

    def __call__(self, gm: torch.fx.GraphModule, ctx: Any) -> int:
        memory = ctx.analyses.memory(gm)
        names = [name for name in memory.outputs[ctx.user_outputs :] if name]
        self.found += memory.bytes_of({piece for name in names for piece in memory.roots.get(name, ())})
        return 0


def _share(**options: object) -> int:
    """The bytes that the forward saves."""
    counted = _SavedBytes()
    pipeline = dsgraph.default_pipeline() + dsgraph.graph_pass(phase="forward")(counted)
    _, records = _step(1, (8, 256), pipeline=pipeline, **options)
    assert all(item.changed > 0 for item in records)
    return counted.found


def _save_a_share() -> None:
    whole, split, ranks = _share(), _share(partition_activations=True), dist.get_world_size()
    replicated = 256 * 2**10  # a hidden state of 8 x 256 x 32 numbers
    fewer = (whole - split) * ranks / (ranks - 1)
    assert fewer >= 4 * replicated, "of the states between layers each rank saves its slice"


@pytest.mark.full  # tests/passes/memory/test_partition_activations.py has the slices of small graphs
def test_the_option_saves_a_share(ranks):
    ranks(2).run(_save_a_share)


def test_without_sliced_operators_it_says_so():
    torch._dynamo.reset()
    compiled = torch.compile(
        nn.Linear(4, 4), backend="dsgraph", options={"codegen": "eager", "partition_activations": True}
    )
    compiled(torch.ones(2, 4)).sum().backward()
    assert "activations are not sharded" in str(dsgraph.report(compiled))
