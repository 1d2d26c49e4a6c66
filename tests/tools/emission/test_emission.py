"""Kernels of a small function, forward and backward, for both architectures."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dsgraph.tools.emission.emission import SETTINGS
from dsgraph.tools.emission.record import EmittedGraph
from tests.tools.emission.test_harness import _state
from tests.tools.emission.test_operators import only_cpu

pytestmark = pytest.mark.inductor

ARCHS = ("sm_80", "sm_90")
Records = dict[tuple[str, str], dict[str, Any]]


def _layer(x, weight, gain):
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return F.silu(F.linear((x.float() * scale).type_as(x) * gain, weight))


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(64, 512), (256, 512), (512,)]
    return [torch.randn(shape).to(torch.bfloat16).requires_grad_() for shape in shapes]


def _train(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    out = torch.compile(function, backend="dsgraph")(*inputs)
    out.float().sum().backward()
    return [out, *(x.grad for x in inputs if x.grad is not None)]


def _read(folder: Path) -> Records:
    found = [json.loads(path.read_text()) for path in folder.glob("graph*.json")]
    return {(record["phase"], record["arch"]): record for record in found}


@pytest.fixture
def emitting(tmp_path, monkeypatch) -> Path:
    """The folder of what is emitted."""
    torch._dynamo.reset()
    (tmp_path / SETTINGS).write_text(json.dumps({"archs": ["sm_90"], "out": str(tmp_path / "out")}))
    monkeypatch.setenv("DSGRAPH_EMIT", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def layer(tmp_path_factory) -> tuple[Path, Records, list[torch.Tensor]]:
    """Where the layer's kernels are, what is written of them, and what the program has computed."""
    folder = tmp_path_factory.mktemp("layer")
    (folder / SETTINGS).write_text(json.dumps({"archs": ARCHS, "out": str(folder / "out")}))
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSGRAPH_EMIT", str(folder))
        before = _state()
        results = _train(_layer, *_inputs())
        assert _state() == before
    return folder / "out", _read(folder), results


def test_every_graph_has_kernels_for_each_architecture_without_spills(layer):
    out, records, _ = layer
    assert set(records) == {(phase, arch) for phase in ("forward", "backward") for arch in ARCHS}
    for (phase, arch), record in records.items():
        assert record["problem"] is None
        triton = [kernel for kernel in record["kernels"] if kernel["kind"] == "triton"]
        assert triton
        for kernel in triton:
            for config in kernel["configurations"]:
                assert (out / config["cubin"]).read_bytes()[:4] == b"\x7fELF"
                assert f".target {arch}" in (out / config["cubin"]).with_suffix(".ptx").read_text()
                assert 8 <= config["resources"]["registers"] <= 255
                assert config["resources"]["spill_bytes"] == 0
            assert (
                "@triton.jit" in (out / arch / f"graph{record['graph']}-{phase}" / f"{kernel['name']}.py").read_text()
            )


def test_the_code_is_that_of_the_device_and_calls_every_kernel(layer):
    out, records, _ = layer
    for (phase, arch), record in records.items():
        code = (out / record["code"]).read_text()
        ast.parse(code)
        assert "empty_strided_cuda(" in code
        assert "empty_strided_cpu(" not in code
        assert f"cc={arch[3:]}," in code
        assert ("tangents_1" in code) == (phase == "backward")
        for kernel in record["kernels"]:
            called = f"{kernel['name']}.run(" if kernel["kind"] == "triton" else "extern_kernels.mm("
            assert code.count(called) == kernel["calls"]


def test_bytes_operations_and_time(layer):
    _, records, _ = layer
    for arch, peak in (("sm_80", 2.039e12), ("sm_90", 3.35e12)):
        norm, product, silu = records["forward", arch]["kernels"]
        assert norm["ops"] == ["pow", "mean", "add", "rsqrt", "mul"]
        assert product["name"] == "cuBLAS mm"
        assert product["flops"] == 2 * 64 * 512 * 256
        assert product["bytes"] == 2 * (64 * 512 + 256 * 512 + 64 * 256)
        assert silu["bytes"] == 2 * 2 * 64 * 256
        assert silu["flops"] == 4 * 64 * 256  # neg, exp, add, div
        assert silu["seconds"] == pytest.approx(5e-6 + silu["bytes"] / (0.85 * peak))


def test_the_program_computes_what_it_computes_without_passes(layer):
    inputs = _inputs()
    out = _layer(*inputs)
    out.float().sum().backward()
    for found, expected in zip(layer[2], [out, *(x.grad for x in inputs)], strict=True):
        assert torch.equal(found, expected)


def test_what_cannot_be_lowered_is_a_problem_of_its_graph_alone(emitting):
    def wrong(x):
        return only_cpu(x).sin()

    before = _state()
    with torch.no_grad():
        x = torch.randn(8)
        assert torch.equal(torch.compile(wrong, backend="dsgraph")(x), (x * 2).sin())
        torch.compile(torch.cos, backend="dsgraph")(x)
    assert _state() == before
    in_order = sorted(emitting.glob("graph*.json"), key=lambda path: path.stat().st_mtime_ns)  # 100 comes after 99
    problems = [json.loads(path.read_text())["problem"] for path in in_order]
    assert problems[1:] == [None]
    assert problems[0].startswith("emission_tests.only_cpu.default has only a kernel for the CPU (")


def test_nothing_is_left_behind_when_lowering_fails(emitting):
    from torch._inductor.lowering import register_lowering

    @torch.library.custom_op("emission_tests::unlucky", mutates_args=())
    def unlucky(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    unlucky.register_fake(torch.empty_like)

    @register_lowering(torch.ops.emission_tests.unlucky.default)
    def lower(x):
        assert torch.cuda.is_available()
        raise ZeroDivisionError("halfway")

    before = _state()
    with torch.no_grad():
        torch.compile(lambda x: unlucky(x) + 1, backend="dsgraph")(torch.randn(8))
    assert _state() == before
    (record,) = _read(emitting).values()
    assert "ZeroDivisionError: halfway" in record["problem"]
    assert not (emitting / "out").exists()


def test_constants_views_writes_and_dynamic_sizes(emitting):
    def function(x, table):
        x = x[:, 1:] * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(2.5)
        table[0, :3].add_(x.sum(0).detach())
        table.t()[1].zero_()
        return F.pad(x, (1, 0)).softmax(-1).sum() + x.relu().cumsum(0).mean()

    def run(compiled):
        torch.manual_seed(0)
        x, table = torch.randn(6, 4, requires_grad=True), torch.ones(3, 4)
        torch._dynamo.mark_dynamic(x, 0)
        out = compiled(x, table)
        out.backward()
        return out, x.grad, table

    for found, expected in zip(run(torch.compile(function, backend="dsgraph")), run(function), strict=True):
        torch.testing.assert_close(found, expected)
    records = _read(emitting)
    assert [record["problem"] for record in records.values()] == [None, None]
    code = (emitting / "out" / records["forward", "sm_90"]["code"]).read_text()
    assert "s77" in code or "s0" in code  # the size stays a symbol


def test_a_record_is_plain_data():
    record = EmittedGraph(1, "forward", "sm_90", "H100", "model.py:3 (f)", problem="none")
    assert json.loads(json.dumps(asdict(record)))["problem"] == "none"
