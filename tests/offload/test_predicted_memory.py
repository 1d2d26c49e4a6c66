"""The memory that `report` predicts for a step with parts on disk, against the bytes of stores and buffer pools."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn, optim

import dsgraph
from dsgraph.inductor_ext.transfers.buffer_pool import Buffer
from dsgraph.offload.chunk_sizes import StateChunk, step_buffers
from dsgraph.offload.stored_rows import stored_rows
from dsgraph.optim.disk_optimizer import DiskOptimizer

pytestmark = pytest.mark.distributed
WIDTH, LAYERS = 1024, 12  # 8 MiB of state a layer: three chunks


@pytest.mark.parametrize("ratio", [1.0, 0.4])
def test_prediction_counts_what_is_held(one_rank, tmp_path, ratio):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    offload = {"optimizer": "disk", "parameters": "disk", "folder": str(tmp_path), "ratio": ratio}
    dsgraph.partition(model, stage=3, offload=offload)
    optimizer = dsgraph.offload_optimizer(optim.AdamW(model.parameters()), model)
    assert isinstance(optimizer, DiskOptimizer)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    for _ in range(2):
        compiled(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = dsgraph.report(model).memory
    assert memory is not None
    (file,) = {id(found.file): found.file for found in map(_stored, model.parameters()) if found}.values()
    kept = sum(chunk.size for chunk in optimizer.chunks) - optimizer.disk_bytes
    assert memory.parts["optimizer state"] == pytest.approx(kept, abs=LAYERS), "each parameter's share is rounded"
    assert memory.buffers == pytest.approx(optimizer.buffer_bytes - kept + file.buffer_bytes, rel=0.02)
    assert sum(memory.below["disk"].values()) == pytest.approx(optimizer.disk_bytes + sum(file.sizes), abs=LAYERS)


def test_a_read_that_is_through_holds_no_buffer(one_rank, tmp_path):
    """A buffer that its pool has dropped is gone."""
    model = nn.Sequential(nn.Linear(256, 272, bias=False), nn.Linear(272, 512, bias=False))
    dsgraph.partition(model, stage=3, offload={"parameters": "disk", "folder": str(tmp_path)})
    small, large = map(_stored, model.parameters())
    assert small is not None and large is not None
    size = 4 * 256 * 272
    small.start().finish(torch.empty(size, dtype=torch.uint8))
    large.start().finish(torch.empty(2 * size, dtype=torch.uint8))
    for _ in range(100):  # the thread that has read it lets go of it a moment later
        if not _buffers(size):
            return
        time.sleep(0.05)
    raise AssertionError("the first buffer is still held")


def _buffers(size):
    return [item for item in gc.get_objects() if type(item) is Buffer and item.size == size]


def _stored(param):
    return stored_rows(param.to_local())


def test_beside_the_backward_a_chunk_is_there_besides_what_graphs_read():
    chunks = [
        StateChunk(state=10, on_disk=True, rows=8, names=("a", "b")),
        StateChunk(state=12, on_disk=True, rows=6, names=("c", "d")),
        StateChunk(state=9, on_disk=False, rows=0, names=("e",)),
    ]
    assert step_buffers(chunks, 3) == (10 + 12) + (8 + 6)
    assert step_buffers(chunks, 30) == (10 + 12) + 30
    stores = [("d", 20), ("c", 11), ("a", 3), ("b", 2)]
    assert step_buffers(chunks, 5, stores=stores) == (10 + 12) + 20
    assert step_buffers(chunks, 5, stores=[("d", 13), *stores[1:]]) == (10 + 12) + (11 + 6)
    assert step_buffers([], 3) == 3
