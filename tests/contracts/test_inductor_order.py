"""Starts and waits stand in Inductor's code for a GPU in the order of the passes, and nothing uses what is under way.

Between start and wait, a collective or a transfer reads its input and fills its result while kernels run.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dsgraph
from dsgraph.tools.emission import harness
from dsgraph.tools.emission.emission import SETTINGS, Emission
from dsgraph.tools.emission.lowering import lower, retarget

pytestmark = pytest.mark.inductor

WAITS = ("wait_tensor", "finish_offload", "wait_transfer")
_CALL = re.compile(r"^\s*(?:(\w+) = )?torch\.ops\.(?:_c10d_functional|dsgraph)\.(\w+)\.default\((.*)\)")
_ALIAS = re.compile(r"^\s*(buf\d+) = (buf\d+)(?:\[(\d+)\])?$")
_MEMORY = re.compile(r"\b(?:buf|primals_|tangents_)\d+\b")


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(self.norm(x))))


def _step(**options: Any) -> None:
    net = nn.Sequential(*(_Block(64) for _ in range(3)))
    model = dsgraph.partition(net, stage=3, keep_whole_below=0, blocks="none")
    compiled = torch.compile(model, backend="dsgraph", options=options)
    compiled(torch.randn(512, 64)).square().mean().backward()


@pytest.fixture
def emitted(tmp_path, monkeypatch) -> list[tuple[list[str], str]]:
    """The starts and waits of each graph that is lowered for a GPU of eight, in order, and its code."""
    found: list[tuple[list[str], str]] = []

    def emit(self: Emission, gm: Any, inputs: Any, *, phase: str, arch: str, patches: Any) -> None:
        called = [node.target for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        names = [op.overloadpacket.__name__ for op in called if op.namespace in ("_c10d_functional", "dsgraph")]
        with harness.fake_device(arch):
            found.append((names, lower(*retarget(gm, inputs), phase=phase, patches=patches).code))

    (tmp_path / SETTINGS).write_text(json.dumps({"archs": ["sm_90"], "out": str(tmp_path / "out")}))
    monkeypatch.setenv("DSGRAPH_EMIT", str(tmp_path))
    monkeypatch.setattr(Emission, "_emit", emit)
    torch._dynamo.reset()
    with harness.fake_ranks(8):
        dist.init_process_group("nccl")
        _step(activation_offload="host", gather_bucket_bytes=20_000)
    return found


def test_the_order_is_that_of_the_passes_and_nothing_under_way_is_used(emitted):
    assert len(emitted) == 2, "forward and backward"
    for names, code in emitted:
        body = code[code.index("def call(") :].splitlines()
        called = [match[2] for line in body if (match := _CALL.match(line))]
        assert called == names
        assert len(names) > 20 and faults_of(body) == []


def faults_of(body: list[str]) -> list[str]:
    """Return the lines of code that use memory under way: they read a result, or take over an input or a result."""
    started: dict[str, list[str]] = {}  # result, or the list of results -> inputs
    under_way: dict[str, set[str]] = {}  # result that is not awaited -> its input
    faults: list[str] = []
    for line in body:
        call, alias, names = _CALL.match(line), _ALIAS.match(line), set(_MEMORY.findall(line))
        if call is not None and call[2] in WAITS:
            under_way.pop(re.findall(r"\w+", call[3])[0], None)
        elif call is not None:
            started[call[1]] = _MEMORY.findall(call[3])
            under_way[call[1]] = set(started[call[1]])
        elif alias is not None and alias[2] in started:  # a result of several; nobody awaits their list
            under_way.pop(alias[2], None)
            inputs = started[alias[2]]
            under_way[alias[1]] = {inputs[int(alias[3])]} if alias[3] else set(inputs)
        elif "# reuse" in line:
            faults += [line] if names & set(under_way).union(*under_way.values()) else []
        elif ".run(" in line or "extern_kernels" in line:
            faults += [line] if names & set(under_way) else []
    return faults


def test_uses_of_memory_under_way_are_found():
    start = "    buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 8, '0')"
    wait = "    torch.ops._c10d_functional.wait_tensor.default(buf1)"
    reuse, read = "    buf2 = buf0; del buf0  # reuse", "    triton_poi_fused_0.run(buf1, buf3, 512, stream=stream0)"
    assert faults_of([start, wait, reuse, read]) == []
    assert faults_of([start, reuse, wait, read]) == [reuse]
    assert faults_of([start, read, wait, reuse]) == [read]
    several = "    buf9 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([buf0, buf5], 8, '0')"
    first, second = "    buf1 = buf9[0]", "    buf7 = buf9[1]"
    assert faults_of([several, first, second, wait, reuse, read]) == []
    assert faults_of([several, first, second, read, wait, reuse.replace("buf0", "buf5")]) == [
        read,
        reuse.replace("buf0", "buf5"),
    ]
