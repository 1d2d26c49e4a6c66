"""A kernel of one's own: squared ReLU in one pass over memory.

    python -m examples.custom_kernel

compiles a model that spells it out, prints what was substituted, and checks outputs and gradients against the plain
model. On a GPU the Triton function below computes it, on the CPU its reference.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.inductor_ext.kernels.launch import tl, triton

BLOCK = 1024


@triton.jit
def square_relu(x_ptr, y_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # a large tensor has more than 2^31 elements
    x = tl.maximum(tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32), 0.0)
    tl.store(y_ptr + at, (x * x).to(y_ptr.dtype.element_ty), mask=at < size)


def launch(x: Tensor) -> Tensor:  # any shape and float dtype -> the same
    x = x.contiguous()
    y = torch.empty_like(x)
    square_relu[(-(-x.numel() // BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


def backward(grad: Tensor, x: Tensor) -> tuple[Tensor]:
    return (2 * grad * torch.relu(x),)


def supports(x: Tensor) -> str | None:
    return None if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else f"its input is {x.dtype}"


@dsgraph.kernel(triton=launch, backward=backward, supports=supports, namespace="example")
def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


class Model(nn.Module):
    """A feed-forward block. It knows nothing of the kernel, and spells the same in other words."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 16] -> the same
        return self.down(nn.functional.relu(self.up(x)).square())


def main() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 16)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "kernels": [squared_relu]})
    ours, plain = compiled(x), model(x)
    parameters = list(model.parameters())
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), parameters), torch.autograd.grad(plain.sum(), parameters)
    )
    print("\n".join(line for line in str(dsgraph.report(model)).splitlines() if "squared_relu" in line))


if __name__ == "__main__":
    main()
