from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from tests.distributed.training import full
from tests.models import build, tokens

pytestmark = pytest.mark.distributed


def _train(stage: int, codegen: str | None, reduce_name: str | None) -> None:
    """bf16 in forward and backward, fp32 masters: against one process that casts by hand."""
    rank, world = dist.get_rank(), dist.get_world_size()
    reduce_dtype = None if reduce_name is None else getattr(torch, reduce_name)
    model = dsgraph.partition(
        build("gpt"), stage=stage, keep_whole_below=20, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype
    )
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert model.head.weight.dtype is torch.bfloat16
    alone = build("gpt")
    for step in range(2):
        runs(*tokens(step, rank)).backward()
        in_bf16 = build("gpt").to(torch.bfloat16)
        sums = [torch.zeros_like(p, dtype=reduce_dtype or torch.bfloat16) for p in in_bf16.parameters()]
        for other in range(world):
            in_bf16.load_state_dict({k: v.to(torch.bfloat16) for k, v in alone.state_dict().items()})
            in_bf16.zero_grad()
            in_bf16(*tokens(step, other)).backward()
            for total, param in zip(sums, in_bf16.parameters(), strict=True):
                total += param.grad.to(total.dtype)
        for mine, theirs, total in zip(model.parameters(), alone.parameters(), sums, strict=True):
            expected = (total / world).float()
            assert mine.grad.dtype is torch.float32
            scale = expected.abs().max().clamp_min(1e-6)
            assert (full(mine.grad) - expected).abs().max() <= 2**-6 * scale
            with torch.no_grad():
                mine -= 0.1 * mine.grad
                theirs.copy_(full(mine))
            mine.grad = None


@pytest.mark.covering(1)
@pytest.mark.parametrize("reduce_name", (None, "float32"))
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_bf16_matches_casting_by_hand(ranks, stage, codegen, reduce_name):
    ranks(2).run(_train, stage, codegen, reduce_name)


class _InFloat32(nn.Linear):
    """A router, say: `model.to(torch.bfloat16)` leaves its weight in float32, and casts its bias."""

    def _apply(self, fn, recurse=True):
        kept = self.weight.data
        super()._apply(fn, recurse)
        self.weight.data = kept
        return self


class _Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.router = nn.Linear(8, 8), _InFloat32(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layer(x).float(), self.router.weight, self.router.bias.float()).sum()


@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize("stage", (0, 3))
def test_modules_keep_the_dtype_that_they_keep_without_dsgraph(one_rank, stage, codegen):
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    expected = _Routed().to(torch.bfloat16)(x)
    model = dsgraph.partition(_Routed(), stage=stage, keep_whole_below=0, param_dtype=torch.bfloat16)
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    assert torch.equal(runs(x), expected)
    seen = [part.dtype for part in (model.router.weight, model.router.bias, model.layer.weight)]
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]
