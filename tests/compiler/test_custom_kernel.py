from __future__ import annotations

import itertools
import math
import operator
import re
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

import dsgraph
from dsgraph.passes.kernels.matching import call_of, is_call
from dsgraph.passes.kernels.spec import KernelSpec, Match
from tests.inductor_ext.kernels.checks import run_interpreted
from tests.passes.kernels.test_substitute_kernels import substitute

_NUMBERS = itertools.count()


def gate(x: Tensor, g: Tensor, beta: float) -> Tensor:
    return x * F.softplus(g, beta) + 1


def _kernel(**options: object) -> KernelSpec:
    """`gate` as a kernel, in a namespace of its own: an op is defined once."""
    return dsgraph.kernel(namespace=f"dsgraph_tests_{next(_NUMBERS)}", **options)(gate)  # type: ignore[arg-type]


def _opaque(spec: KernelSpec):
    """Return the op that replaces the reference on a GPU."""
    return getattr(torch.ops, spec.op.namespace).gate_triton.default


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)


def _same(x: Tensor, g: Tensor) -> Tensor:
    return gate(x, g, 0.5)


def _other_words(x: Tensor, g: Tensor) -> Tensor:
    return torch.add(1, torch.multiply(F.softplus(g, beta=0.5), x))


@pytest.mark.parametrize("function", [_same, _other_words])
def test_it_stands_in_wherever_the_calls_are_those_of_the_reference(function):
    spec, inputs = _kernel(), _inputs()
    gm, record, result = substitute(function, *inputs, kernels=[spec])
    assert record.changed == 1 and "softplus" not in gm.code and ", 0.5)" in gm.code
    assert torch.equal(result, function(*inputs))
    ours, plain = (torch.autograd.grad(item.sin().sum(), inputs) for item in (result, function(*inputs)))
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, g: x * F.softplus(g, 0.5, 10) + 1,
        lambda x, g: x * F.softplus(g, 0.5) + 2,
        lambda x, g: x * F.softplus(g, 0.5) + 1.0,
        lambda x, g: x - F.softplus(g, 0.5) + 1,
        lambda x, g: torch.add(x * F.softplus(g, 0.5), 1, alpha=2),
        lambda x, g: x * F.silu(g) + 1,
    ],
)
def test_other_calls_are_left_alone(function):
    _, record, result = substitute(function, *_inputs(), kernels=[_kernel()])
    assert record.changed == 0 and "is not used in this graph" in record.notes[0]
    assert torch.equal(result, function(*_inputs()))


def test_what_is_given_twice_must_be_the_same():
    def twice(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    spec = dsgraph.kernel(namespace="dsgraph_tests_twice")(twice)
    assert substitute(lambda x, g: torch.sigmoid(x) * x, *_inputs(), kernels=[spec])[1].changed == 1
    assert substitute(lambda x, g: torch.sigmoid(x) * g, *_inputs(), kernels=[spec])[1].changed == 0


@pytest.mark.parametrize("given", [True, False])
def test_the_launcher_is_differentiated_as_the_reference(given):
    def launch(x: Tensor, g: Tensor, beta: float) -> Tensor:
        return gate(x, g, beta)

    def backward(grad: Tensor, x: Tensor, g: Tensor, beta: float) -> tuple[Tensor | None, ...]:
        return grad * F.softplus(g, beta), (grad * x * torch.sigmoid(g * beta)).sum(0), None

    spec = _kernel(triton=launch, backward=backward if given else None)
    inputs = _inputs()
    for needed in (inputs, inputs[1:]):
        x, g = (item if any(item is other for other in needed) else item.detach() for item in inputs)
        ours, plain = (torch.autograd.grad(op(x, g, 0.5).sin().sum(), needed) for op in (_opaque(spec), gate))
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_the_launchers_run_on_the_device_of_their_first_tensor(monkeypatch):
    """There may be one device here, or none: what is noted is for which tensor it is made current, and for how long."""
    noted: list[object] = []

    @contextmanager
    def on_device_of(x: Tensor) -> Iterator[None]:
        noted.append(x.shape)
        yield
        noted.append("left")

    def launch(beta: float, x: Tensor, g: Tensor) -> Tensor:
        noted.append("forward")
        return gate(x, g, beta)

    def backward(grad: Tensor, beta: float, x: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
        noted.append("backward")
        return None, grad * F.softplus(g, beta), (grad * x * torch.sigmoid(g * beta)).sum(0)

    def number_first(beta: float, x: Tensor, g: Tensor) -> Tensor:
        return gate(x, g, beta)

    monkeypatch.setattr(import_module("dsgraph.compiler.custom_kernel"), "on_device_of", on_device_of)
    dsgraph.kernel(namespace="dsgraph_tests_device", triton=launch, backward=backward)(number_first)
    x, g = _inputs()
    result = torch.ops.dsgraph_tests_device.number_first_triton(0.5, x, g)
    assert noted == [(3, 4), "forward", "left"]
    result.sum().backward()
    assert noted[3:] == [(3, 4), "backward", "left"]


def test_torch_takes_its_ops_for_well_formed():
    spec, inputs = _kernel(triton=lambda x, g, beta: gate(x, g, beta)), _inputs()
    torch.library.opcheck(_opaque(spec), (*inputs, 0.5))
    torch.library.opcheck(
        spec.op, (*inputs, 0.5), test_utils=["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    )


def test_what_it_cannot_take_is_said():
    spec = _kernel(supports=lambda x, g, beta: f"beta is {beta}" if beta < 1 else None)
    _, record, _ = substitute(_same, *_inputs(), kernels=[spec])
    assert record.changed == 0 and "beta is 0.5" in record.notes[0]


def test_a_matcher_of_ones_own():
    def match(node: Node) -> Match | None:
        product = call_of(node.args[0])
        if product is None or not is_call(product.arguments.get("other"), "softplus"):
            return None
        return Match(node, (product.input, call_of(product["other"]).input, 1.0))

    spec = _kernel(match=match, anchor=lambda node: node.target is operator.add)
    _, record, result = substitute(lambda x, g: x * (1 + g.exp()).log() + 1, *_inputs(), kernels=[spec])
    assert record.changed == 0 and "is not used in this graph" in record.notes[0]
    _, record, result = substitute(lambda x, g: x * F.softplus(g) + 1, *_inputs(), kernels=[spec])
    assert record.changed == 1
    assert torch.equal(result, gate(*_inputs(), 1.0))


def test_the_example_of_the_docs_does_what_they_say(tmp_path, capsys):
    text = (Path(__file__).parents[2] / "docs" / "guides" / "write-a-kernel.md").read_text()
    example, shown = re.search(r"```python[^\n]*\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL).groups()
    (tmp_path / "example.py").write_text(example)
    torch._dynamo.reset()
    found = runpy.run_path(str(tmp_path / "example.py"))
    said = re.sub(r"compile \d+", "compile 1", " ".join(capsys.readouterr().out.split()))  # counted in this process
    assert "squared_relu in 1 place" in shown and " ".join(shown.split()) in said
    x = torch.randn(8)
    assert torch.equal(found["compiled"](x), found["Model"]()(x))


@pytest.mark.parametrize("end", [lambda y: y**2, lambda y: y.square(), lambda y: torch.pow(y, 2), torch.square])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_square_is_a_power_of_two(end, dtype):
    def squared_twice(x: Tensor) -> Tensor:
        return ((x * x).square() + 1) ** 2

    x = torch.tensor([-2, 0, 3]).to(dtype)
    spec = dsgraph.kernel(namespace=f"dsgraph_tests_{next(_NUMBERS)}")(squared_twice)
    _, record, result = substitute(lambda x: end(end(x * x) + 1), x, kernels=[spec])
    expected = squared_twice(x)
    assert record.changed == 1 and result.dtype is expected.dtype and torch.equal(result, expected)


@pytest.mark.parametrize("end", [lambda y: y**3, lambda y: y**2.0, lambda y: y**y, lambda y: 2**y])
def test_other_powers_are_no_squares(end):
    def squared(x: Tensor) -> Tensor:
        return torch.relu(x).square()

    spec, x = dsgraph.kernel(namespace=f"dsgraph_tests_{next(_NUMBERS)}")(squared), torch.tensor([-2, 0, 3])
    _, record, result = substitute(lambda x: end(torch.relu(x)), x, kernels=[spec])
    assert record.changed == 0 and torch.equal(result, end(torch.relu(x)))


def test_a_reference_that_reshapes_stands_for_the_same_sizes_alone():
    def in_fours(x: Tensor) -> Tensor:
        return torch.softmax(x.view(-1, 4), -1)

    spec, x = dsgraph.kernel(namespace="dsgraph_tests_sizes")(in_fours), torch.randn(4, 4)
    assert substitute(in_fours, x, kernels=[spec])[1].changed == 1
    for sizes in ((-1, 8), (2, -1, 4)):
        _, record, result = substitute(lambda x, sizes=sizes: torch.softmax(x.view(*sizes), -1), x, kernels=[spec])
        assert record.changed == 0 and torch.equal(result, torch.softmax(x.view(*sizes), -1))


def _not(x: Tensor, y: Tensor) -> Tensor:
    return torch.logical_not(x + y)


def _and(x: Tensor, y: Tensor) -> Tensor:
    return torch.logical_and(x, y)


def _or(x: Tensor, y: Tensor) -> Tensor:
    return torch.logical_or(x, y)


@pytest.mark.parametrize(
    ("reference", "bitwise"),
    [(_not, lambda x, y: ~(x + y)), (_and, lambda x, y: x & y), (_or, lambda x, y: x | y)],
)
def test_a_logical_reference_does_not_stand_for_a_bitwise_call(reference, bitwise):
    spec = dsgraph.kernel(namespace="dsgraph_tests_logical")(reference)
    x, y = torch.tensor([2, 0, 1]), torch.tensor([1, 0, 3])
    assert substitute(reference, x, y, kernels=[spec])[1].changed == 1
    _, record, result = substitute(bitwise, x, y, kernels=[spec])
    assert record.changed == 0 and torch.equal(result, bitwise(x, y))


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def _untyped(x):
    return x.sin()


def _branches(x: Tensor) -> Tensor:
    return x.sin() if x.sum() > 0 else x.cos()


def _does_nothing(x: Tensor) -> Tensor:
    return x


def _ignores(x: Tensor, y: Tensor) -> Tensor:
    return x.sin()


def _named(x: Tensor, *, scale: float) -> Tensor:
    return x * scale


def _optional(x: Tensor, y: Tensor | None) -> Tensor:
    return x * y


def _several(x: Tensor, sizes: list[int]) -> Tensor:
    return x.view(sizes)


_TABLE = torch.ones(4)


def _of_a_constant(x: Tensor) -> Tensor:
    return x * _TABLE


def _in_place(x: Tensor) -> Tensor:
    return x.relu_()


def _in_place_on_the_way(x: Tensor) -> Tensor:
    y = x + 1
    F.relu(y, inplace=True)
    return y * 2


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (_two, {}, r"kernel _two: it returns \(Tensor, Tensor\); a kernel returns one Tensor"),
        (_untyped, {}, "kernel _untyped: an op cannot have its signature: .*type annotation"),
        (_branches, {}, r"kernel _branches: its reference is no pattern: it cannot be traced .*; give match= and"),
        (_does_nothing, {}, "it does not return the result of a call"),
        (_ignores, {}, "it does not read y"),
        (_optional, {}, r"kernel _optional: its reference is no pattern: its parameter y is .*None.*; give match= and"),
        (_several, {}, r"its parameter sizes is list\[int\], and a pattern knows a Tensor or a number alone"),
        (_of_a_constant, {}, "it reads a tensor that is no parameter"),
        (_in_place, {}, "its call of relu_ writes to an argument, which a kernel does not"),
        (_in_place_on_the_way, {}, "its call of relu writes to an argument"),
        (_named, {}, r"its parameter scale is keyword-only: remove the \*"),
        (gate, {"match": math.sin}, "match and anchor go together: add anchor="),
        (gate, {"backward": math.sin}, "backward has no effect without triton"),
    ],
)
def test_what_is_no_kernel_is_refused_in_one_sentence(function, options, message):
    with pytest.raises(dsgraph.KernelError, match=message) as error:
        dsgraph.kernel(namespace="dsgraph_tests_refused", **options)(function)
    assert "\n" not in str(error.value)


def test_the_decorator_wants_its_parentheses():
    with pytest.raises(dsgraph.KernelError, match=r"kernel gate: write @dsgraph.kernel\(\) above it"):
        dsgraph.kernel(gate)


def test_an_op_is_defined_once():
    dsgraph.kernel(namespace="dsgraph_tests_once")(gate)
    with pytest.raises(dsgraph.KernelError, match="there is an op dsgraph_tests_once::gate already"):
        dsgraph.kernel(namespace="dsgraph_tests_once")(gate)


@pytest.mark.slow
def test_the_triton_kernel_of_the_example_gives_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own, where the op takes the launcher on the CPU."""
    from examples.custom_kernel import main, squared_relu

    for shape in ((1,), (3, 7), (5, 1025)):
        x = torch.randn(shape, requires_grad=True)
        ours, plain = squared_relu.op(x), squared_relu.reference(x)
        assert type(ours.grad_fn) is not type(plain.grad_fn)  # the launcher's own
        torch.testing.assert_close(ours, plain)
        torch.testing.assert_close(*(torch.autograd.grad(item.sum(), x) for item in (ours, plain)))
    main()


@pytest.mark.inductor
def test_inductor_fuses_its_reference_with_the_neighbours():
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    inputs, spec = tuple(item.detach() for item in _inputs()), _kernel(triton=lambda x, g, beta: gate(x, g, beta))
    compiled = torch.compile(lambda x, g: _same(x.cos(), g).sin(), backend="dsgraph", options={"kernels": [spec]})
    result, (code, *_) = run_and_get_code(compiled, *inputs)
    assert "dsgraph_tests" not in code
    torch.testing.assert_close(result, _same(inputs[0].cos(), inputs[1]).sin())
