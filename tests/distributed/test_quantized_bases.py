"""Frozen quantized weights of bitsandbytes under adapters: shards of bytes, and the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dsgraph
from tests.distributed.training import full

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.distributed, pytest.mark.full]

WIDTH = 128


def _four_bits(inputs: int, outputs: int, **options: Any) -> nn.Module:
    return bitsandbytes.nn.Linear4bit(inputs, outputs, compute_dtype=torch.float32, quant_type="nf4", **options)


def _eight_bits(inputs: int, outputs: int) -> nn.Module:
    return bitsandbytes.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False)


KINDS = {
    "nf4": _four_bits,
    "nf4-without-double-quantization": lambda *sizes: _four_bits(*sizes, bias=False, compress_statistics=False),
    "int8": _eight_bits,
}


class _Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = KINDS[kind](WIDTH, 2 * WIDTH), KINDS[kind](2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _base(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return _Net(kind).to("cpu").requires_grad_(False)  # `to` quantizes


def _adapted(kind: str, seed: int = 0, **options: Any) -> nn.Module:
    model = peft.get_peft_model(
        _base(kind, seed), peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False, **options)
    )
    torch.manual_seed(seed + 1)
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.05)
    return model


def _batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def _train(model: nn.Module, runs: Any, rows: slice) -> list[Tensor]:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-3)
    losses = []
    for step in range(3):
        loss = (runs(_batch(step)[rows]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _mine() -> slice:
    return slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)


def _check(kind: str, stage: int, codegen: str | None) -> None:
    alone, model = _adapted(kind), _adapted(kind, seed=dist.get_rank())  # the first rank's values count
    sizes = {name: param.nbytes for name, param in model.named_parameters() if "base_layer.weight" in name}
    dsgraph.partition(model, stage=stage, keep_whole_below=0)
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    expected = _train(alone, alone, slice(None))
    for loss, other in zip(_train(model, runs, _mine()), expected, strict=True):
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / 2, other, rtol=1e-4, atol=1e-4)
    parameters = dict(model.named_parameters())
    for name, theirs in alone.named_parameters():
        torch.testing.assert_close(full(parameters[name]), theirs.data, rtol=1e-3, atol=1e-3)
    for name, size in sizes.items():
        assert isinstance(parameters[name], DTensor)
        assert parameters[name].to_local().nbytes == (size if stage == 0 else size // 2), name


CASES = [*((kind, 3, codegen) for kind in KINDS for codegen in (None, "eager")), ("nf4", 0, None), ("nf4", 1, "eager")]


@pytest.mark.parametrize(("kind", "stage", "codegen"), [*CASES, ("int8", 0, "eager"), ("int8", 1, None)])
def test_adapters_train_as_in_one_process_over_sharded_bytes(ranks, kind, stage, codegen):
    ranks(2).run(_check, kind, stage, codegen)


def _full_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value).detach().clone() for name, value in model.state_dict().items()}


def _save_and_load(kind: str, stage: int) -> None:
    alone, model, other = _adapted(kind), _adapted(kind), _adapted(kind, seed=7)
    saved = _full_state(dsgraph.partition(model, stage=stage, keep_whole_below=0))
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in alone.state_dict().items()
    }
    other = dsgraph.partition(other, stage=stage, keep_whole_below=0)
    assert not torch.equal(other(_batch(0)), alone(_batch(0)))
    other.load_state_dict(saved)
    torch.testing.assert_close(other(_batch(0)), alone(_batch(0)))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_holds_bytes_and_scales(ranks, kind, stage):
    ranks(2).run(_save_and_load, kind, stage)


def _refuse() -> None:
    import torchao.quantization as ao

    for config in (ao.Int8WeightOnlyConfig(), ao.Int8DynamicActivationInt8WeightConfig()):
        model = nn.Sequential(nn.Linear(64, 64))
        ao.quantize_(model, config)
        kind = type(model[0].weight).__name__
        for stage in (0, 3):
            with pytest.raises(
                dsgraph.PartitionError, match=rf"'0.weight' is a {kind}, a tensor subclass .* Linear4bit"
            ):
                dsgraph.partition(model, stage=stage)
    for kind in KINDS:
        with pytest.raises(dsgraph.PartitionError, match=r"'up.weight' is not quantized yet: move the model"):
            dsgraph.partition(_Net(kind), stage=3)
    with pytest.raises(dsgraph.PartitionError, match="is DoRA of PEFT over a quantized weight: use LoRA"):
        dsgraph.partition(_adapted("nf4", use_dora=True), stage=3)


def test_other_quantized_weights_are_refused(ranks):
    pytest.importorskip("torchao")
    ranks(2).run(_refuse)
