from __future__ import annotations

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dsgraph.passes import MeshAxis, PassError
from dsgraph.passes.analysis.cost import CostModel, flops, moved_bytes, sent_bytes
from dsgraph.passes.analysis.hardware import DEVICES, LINKS, PRODUCTS, TIERS, Device, Link, LinkTable, product_of
from dsgraph.passes.analysis.sizes import UNKNOWN_SIZE, hint, number_of, size_hints, tensor_bytes
from dsgraph.passes.ir.collectives import collectives
from tests.passes.tracing import GLOO, OUTER, trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
F32 = 4  # bytes


def node(gm, name):
    (found,) = [n for n in gm.graph.nodes if n.name == name]
    return found


def symbolic(function, *inputs):
    return make_fx(function, tracing_mode="symbolic")(*inputs)


def test_bytes_of_tensors_tuples_and_of_what_is_none():
    assert tensor_bytes(torch.empty(3, 5, dtype=torch.bfloat16)) == 30
    assert tensor_bytes((torch.empty(2), [torch.empty(3, dtype=torch.int64), None], 7)) == 8 + 24
    assert tensor_bytes(None) == tensor_bytes("x") == tensor_bytes(torch.empty(0, 4)) == 0


def test_symbolic_sizes_stay_expressions_and_have_a_number_behind_them():
    gm = symbolic(lambda x, y: torch.mm(x, y), torch.randn(6, 10), torch.randn(10, 7))
    value = node(gm, "mm").meta["val"]
    size = tensor_bytes(value)
    assert isinstance(size, sympy.Expr) and len(size.free_symbols) == 2
    assert hint(size, size_hints(value)) == 6 * 7 * F32
    assert hint(value.shape[0]) == 6 and hint(12) == 12
    assert hint(size, unknown=2) == 4 * F32
    with pytest.raises(PassError, match=r"depends on s\d+, s\d+, of which no number is known"):
        hint(size)


def test_flops_are_torchs():
    def function(x, w, q, k, v):
        return torch.mm(x, w).tanh(), torch.nn.functional.scaled_dot_product_attention(q, k, v)

    heads = [torch.randn(2, 3, 16, 8) for _ in range(3)]
    gm = trace(function, torch.randn(4, 5), torch.randn(5, 6), *heads)
    assert flops(node(gm, "mm")) == 2 * 4 * 5 * 6
    (attention,) = [n for n in gm.graph.nodes if "scaled_dot_product" in n.name]
    assert attention.target is aten._scaled_dot_product_flash_attention_for_cpu.default  # which torch does not list
    assert flops(attention) == 2 * 2 * (2 * 3 * 16 * 16 * 8)
    assert [flops(n) for n in gm.graph.nodes if n.name in ("x_1", "tanh", "output")] == [0, 0, 0]


def test_flops_of_symbolic_sizes_put_no_guard_on_the_graph():
    gm = symbolic(lambda x, y, b: torch.addmm(b, x, y), torch.randn(6, 10), torch.randn(10, 7), torch.randn(7))
    product = node(gm, "addmm")
    shapes = product.meta["val"].shape[0].node.shape_env
    guards = len(shapes.guards)
    found = flops(product)
    assert isinstance(found, sympy.Expr)
    assert hint(found, size_hints([n.meta["val"] for n in product.all_input_nodes])) == 2 * 6 * 10 * 7
    assert len(shapes.guards) == guards


def test_flops_of_sizes_that_are_equal_by_a_guard():
    parts = [torch.randn(rows, 6) for rows in (2, 4, 3, 3)]
    gm = symbolic(lambda a, b, c, d: torch.cat([a, b]).t() @ torch.cat([c, d]), *parts)
    product = node(gm, "mm")
    assert number_of(product, flops(product)) == 2 * 6 * 6 * 6


@pytest.mark.parametrize("traced", [trace, symbolic])
def test_flops_of_a_head_without_logits(traced):
    options = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0}

    def function(hidden, weight, target, scale):
        ops = torch.ops.dsgraph
        losses = ops.linear_cross_entropy_rows(hidden, weight, target, None, **options)
        needs = [True, False, False]
        return losses, *ops.linear_cross_entropy_grads(hidden, weight, target, None, scale, needs=needs, **options)

    gm = traced(function, torch.randn(6, 4), torch.randn(9, 4), torch.zeros(6).long(), torch.ones(6))
    rows, grads = (n for n in gm.graph.nodes if "linear_cross_entropy" in n.name)
    product = 2 * 6 * 9 * 4
    for found, expected in ((rows, product), (grads, 2 * product)):
        assert hint(flops(found), size_hints([n.meta["val"] for n in found.all_input_nodes])) == expected


def test_a_kernel_reads_its_operands_and_writes_its_results():
    def function(x, table, rows):
        looked_up = aten.embedding(table, rows)
        copied = aten.copy_(torch.empty_like(x), x)
        a, b = aten.split(x, 2)
        return looked_up, copied, a + b, aten._unsafe_view(torch.mm(x, x.t()), [16]), x + x[0].expand(4, 8), x.add_(1)

    gm = trace(function, torch.randn(4, 8), torch.randn(1000, 8), torch.zeros(3, dtype=torch.int64))
    found = {n.name: moved_bytes(n) for n in gm.graph.nodes}
    x = 4 * 8 * F32
    assert found["embedding"] == 2 * 3 * 8 * F32 + 3 * 8  # not the table
    assert found["empty_like"] == 0 and found["copy_"] == 2 * x
    assert found["add"] == 3 * x // 2
    assert found["mm"] == 2 * x + 16 * F32
    assert found["add_1"] == 2 * x + 8 * F32  # an expanded row is read once
    assert found["add_"] == 2 * x
    assert {found[name] for name in ("x_1", "split", "getitem", "t", "_unsafe_view", "expand", "output")} == {0}


def exchange(x):
    gathered = torch.ops.dsgraph.gather_by_messages(x, 4, "0")
    calls = [
        gathered,
        c10d.all_gather_into_tensor(x, 4, "0"),
        c10d.reduce_scatter_tensor(x, "sum", 4, "0"),
        c10d.all_reduce(x, "sum", "0"),
        c10d.all_to_all_single(x, [2] * 4, [2] * 4, "0"),
        c10d.broadcast(x, 0, "0"),
        *c10d.all_gather_into_tensor_coalesced([x, x], 4, "0"),
        *c10d.reduce_scatter_tensor_coalesced([x, x], "sum", 4, "0"),
        *c10d.all_reduce_coalesced([x, x], "sum", "0"),
    ]
    return [c10d.wait_tensor(call) for call in calls]


def test_bytes_sent_are_the_least_that_any_algorithm_sends():
    gm = trace(exchange, torch.randn(8, 3))
    x = 8 * 3 * F32
    once = [3 * x, 3 * x, 3 * x // 4, 6 * x // 4, 3 * x // 4, 3 * x // 4]
    assert [sent_bytes(n, 4) for n in collectives(gm)] == [*once, *(2 * size for size in once[1:4])]
    assert [sent_bytes(n, 1) for n in collectives(gm)] == [0] * 9
    (wait, *_) = [n for n in gm.graph.nodes if n.target is c10d.wait_tensor.default]
    assert sent_bytes(wait, 4) == moved_bytes(wait) == moved_bytes(collectives(gm)[0]) == 0


def test_a_part_of_a_byte_counts_as_one_and_symbols_stay():
    gm = trace(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")), torch.zeros(5, dtype=torch.uint8))
    assert sent_bytes(collectives(gm)[0], 3) == 7  # of 6.67
    gm = symbolic(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")), torch.zeros(5, dtype=torch.uint8))
    (started,) = collectives(gm)
    sent = sent_bytes(started, 3)
    assert sent.free_symbols and hint(sent, size_hints(started.meta["val"])) == 7


def test_a_collective_that_is_not_known_is_none():
    gm = trace(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")), torch.randn(4))
    (started,) = collectives(gm)
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("of_another_kind(Tensor input, str group_name) -> Tensor")
        started.target, started.args = c10d.of_another_kind.default, (started.args[0], "0")
        assert sent_bytes(started, 2) is None
        assert CostModel.default([GLOO]).seconds(started) is None


def test_seconds_are_those_of_the_slower_of_computing_and_moving():
    gm = trace(lambda x, w: torch.tanh(torch.mm(x, w)).t(), torch.randn(64, 64), torch.randn(64, 64))
    model = CostModel(Device(flops_per_s=1e6, bytes_per_s=1e9, kernel_s=0.5))
    matrix = 64 * 64 * F32
    assert model.seconds(node(gm, "mm")) == pytest.approx(0.5 + 2 * 64**3 / 1e6)
    assert model.seconds(node(gm, "tanh")) == pytest.approx(0.5 + 2 * matrix / 1e9)
    assert [model.seconds(node(gm, name)) for name in ("t", "x_1", "output")] == [0, 0, 0]


def test_seconds_of_a_collective_are_steps_and_bytes_of_its_axis():
    shard = MeshAxis("shard", 4, "0", "nccl")
    model = CostModel(DEVICES["cuda"], (shard, OUTER), {"0": Link(latency_s=1.0, bytes_per_s=24.0)})
    gm = trace(exchange, torch.randn(8, 3))
    x = 8 * 3 * F32
    seconds = [model.seconds(n) for n in collectives(gm)]
    assert seconds[:4] == pytest.approx([1 + 3 * x / 24, 3 + 3 * x / 24, 3 + 3 * x / 96, 6 + 6 * x / 96])
    gm = trace(lambda y: c10d.wait_tensor(c10d.all_reduce(y, "sum", "users own")), torch.randn(4))
    assert model.seconds(collectives(gm)[0]) is None


def test_defaults_follow_device_and_backend():
    gloo = CostModel.default([GLOO, OUTER])
    assert gloo.device == DEVICES["cpu"]
    assert gloo.links == {"0": LINKS["gloo"], "1": LINKS["nccl"]}
    fake = MeshAxis("shard", 8, "2", "fake")
    assert CostModel.default([fake]).links == {"2": LINKS["gloo"]}
    assert CostModel.default([fake], device_type="xpu") == CostModel(
        DEVICES["cuda"], (fake,), {"2": LINKS["nccl"]}, TIERS["cuda"]
    )


def test_a_link_may_be_another_for_each_kind():
    shard = MeshAxis("shard", 4, "0", "gloo")
    table = LinkTable(Link(1.0, 24.0), (("all_reduce", Link(0.5, 48.0)),))
    model = CostModel(DEVICES["cpu"], (shard,), {"0": table})
    gm = trace(lambda y: c10d.wait_tensor(c10d.all_reduce(y, "sum", "0")), torch.randn(8, 3))
    assert model.seconds(collectives(gm)[0]) == pytest.approx(6 * 0.5 + 6 * 96 / 4 / 48)
    assert model.transfer_seconds("all_reduce", "0", 96) == pytest.approx(6 * 0.5 + 2)
    assert model.transfer_seconds("all_to_all_single", "0", 96) == pytest.approx(3 * 1 + 4)
    assert model.transfer_seconds("all_reduce", "users own", 96) is None
    assert model.transfer_seconds("of_another_kind", "0", 96) is None
    assert table.of("all_reduce") != table.of("broadcast") == Link(1.0, 24.0).of("all_reduce") == table.usual
    with pytest.raises(KeyError, match=r"no collective is called 'all_gather': .*\(all_gather_into_tensor, "):
        table.of("all_gather")


@pytest.mark.parametrize(
    ("reported", "product"),
    [
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40", None),
        ("NVIDIA A10", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("", None),
    ],
)
def test_a_gpu_is_known_by_the_name_that_it_reports(reported, product):
    assert product_of(reported) == product
    model = CostModel.default(device_type="cuda", device_name=reported)
    assert model.device == (PRODUCTS[product].device if product else DEVICES["cuda"])
    assert model.tiers["host"] == (PRODUCTS[product].host if product else TIERS["cuda"]["host"])
    assert model.tiers["disk"] == TIERS["cuda"]["disk"]


def test_an_all_reduce_of_nccl_goes_over_trees_and_a_gather_over_a_ring():
    def seconds(kind, backend, ranks):
        return CostModel.default([MeshAxis("shard", ranks, "0", backend)]).transfer_seconds(kind, "0", 0)

    assert seconds("all_reduce", "nccl", 64) == pytest.approx(6 * seconds("all_reduce", "nccl", 2))
    assert seconds("all_gather_into_tensor", "nccl", 64) == pytest.approx(
        63 * seconds("all_gather_into_tensor", "nccl", 2)
    )
    assert seconds("all_reduce", "gloo", 64) == pytest.approx(63 * seconds("all_reduce", "gloo", 2))
    # NCCL's own predictions for 64 GPUs in nodes of 8 (see `LINKS`).
    assert 5e-5 < seconds("all_reduce", "nccl", 64) < 1.5e-4
    assert 1.4e-4 < seconds("all_gather_into_tensor", "nccl", 64) < 3e-4


def test_kernels_run_at_the_rate_of_their_dtype():
    gm = trace(torch.mm, torch.randn(64, 64), torch.randn(64, 64))
    half = trace(torch.mm, torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16())
    model = CostModel(Device(1e6, 1e30, 0.0, of_dtype=(("float32", 1e3),)))
    assert model.seconds(node(gm, "mm")) == pytest.approx(2 * 64**3 / 1e3)
    assert model.seconds(node(half, "mm")) == pytest.approx(2 * 64**3 / 1e6)
    assert model.kernel_seconds(1000, 0) == pytest.approx(1e-3)


def test_sizes_that_only_the_data_decide_have_a_number_in_seconds():
    def function(x):
        rows = torch.nonzero(x)
        torch._check(rows.shape[0] >= 2)
        return rows * 2

    gm = symbolic(function, torch.ones(5, 3))
    double = next(n for n in gm.graph.nodes if n.name == "mul")
    model = CostModel(Device(flops_per_s=1.0, bytes_per_s=1.0, kernel_s=0.0))
    assert model.seconds(double) == 2 * UNKNOWN_SIZE * 2 * 8
