"""The output of an engine about its steps, which changes none of them."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import dsgraph
from dsgraph.engine.monitoring.collective_times import busy
from dsgraph.engine.monitoring.flops_profiler import latencies
from dsgraph.partitioning.state import partition_states
from examples.gpt import GPT, GPTConfig
from tests.engine.training import batches, config
from tests.models import build

pytestmark = pytest.mark.distributed


def _everything(folder: Path) -> dict[str, object]:
    return {
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "flops_profiler": {"enabled": True, "output_file": str(folder / "profile.txt")},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"},
        "dsgraph": {"codegen": "eager", "metrics_file": str(folder / "metrics.jsonl")},
    }


def _train(settings: dict[str, object], steps: int = 4) -> tuple[list[float], list[torch.Tensor], dict[str, float]]:
    torch.manual_seed(dist.get_rank())
    wanted = config(3, gradient_accumulation_steps=2, **settings)
    engine, _, _, _ = dsgraph.initialize(model=build("dropout"), config=wanted)
    data = batches(dist.get_rank())
    losses = [float(engine.train_batch(data)) for _ in range(steps)]
    params = [param.detach().to_local().clone() for param in engine.module.parameters()]
    times = engine.timings()
    engine.close()
    return losses, [*params, torch.get_rng_state()], times


def _looked_at(folder: str) -> tuple[list[float], str]:
    quiet, before, none = _train({})
    with redirect_stdout(io.StringIO()) as said:
        losses, after, times = _train(_everything(Path(folder)))
    assert losses == quiet and all(map(torch.equal, before, after)), "the same bits, looked at or not"
    assert none == {} and set(times) == {"forward", "backward", "gather", "reduce", "step"} and min(times.values()) > 0
    return losses, said.getvalue()


def test_what_is_shown_is_what_was_done_and_changes_nothing(ranks, tmp_path):
    (first, said), (second, nothing) = ranks(2).run(_looked_at, str(tmp_path))
    mean = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["Train/Samples/train_loss"] for line in lines] == pytest.approx(mean, rel=1e-6)
    assert [(line["step"], line["samples"]) for line in lines] == [(1, 8), (2, 16), (3, 24), (4, 32)]
    rows = (tmp_path / "job" / "Train_Samples_lr.csv").read_text().split()
    assert rows == ["step,lr", *(f"{samples},0.01" for samples in (8, 16, 24, 32))]
    assert nothing == "", "one rank speaks"
    (shown,) = re.findall(r"^step 4: loss ([\d.]+), .*TFLOPS per rank, .* MiB peak$", said, re.MULTILINE)
    assert float(shown) == pytest.approx(mean[-1], rel=1e-3)
    assert re.search(
        r"ms per step: forward [\d.]+, backward [\d.]+, step [\d.]+, gather [\d.]+, reduce [\d.]+\n  MiB: parameters ",
        said,
    )
    assert (tmp_path / "profile.txt").read_text().startswith("profile of one micro-batch on one rank, after step 1")


def _event(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=DeviceType.CPU)


def test_a_moment_in_which_two_gathers_are_under_way_counts_once():
    events = [
        _event("dsgraph::gather_by_messages_coalesced", 0, 10),
        _event("gloo:send", 5, 2005),
        _event("gloo:recv", 1005, 3005),
        _event("dsgraph::exchange_by_messages", 3500, 3510),
        _event("gloo:recv", 3505, 4505),
        _event("c10d::allreduce_", 6000, 6010),
        _event("gloo:all_reduce", 6005, 6505),
        _event("aten::mm", 0, 9000),
    ]
    assert busy(reversed(events)) == {"gather": 3.0, "reduce": 1.5}


def _gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    tokens = torch.arange(32).reshape(2, 16)
    return GPT(GPTConfig(vocab=64, width=32, heads=2, layers=2)), (tokens, tokens)


def _gpt2() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import transformers

    made = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, use_cache=False)
    return _HoldsLoss(transformers.GPT2LMHeadModel(made)), (torch.arange(32).reshape(2, 16),)


def _llama() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import transformers

    made = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    return _HoldsLoss(transformers.LlamaForCausalLM(made)), (torch.arange(32).reshape(2, 16),)


class _HoldsLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def _flops(make) -> None:
    model, batch = make()
    # `FlopCounterMode` knows no formula of torch's fused attention for CPUs.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = model(*batch)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        model.zero_grad()
        wanted = config(3, flops_profiler={"enabled": True, "profile_step": 1})
        engine, _, _, _ = dsgraph.initialize(model=model, config=wanted)
        for _ in range(2):
            engine.train_batch(iter([batch]))
    (part,) = partition_states(engine.module)
    assert len(part.step.ran()) == 2, "blocks are units, as without a profile"
    assert len({call.unit.block for call in part.step.plans.recorded.calls} - {""}) == 1, "of one graph"
    profile = {module.name: module for module in engine.flops_profile()}
    whole = profile[""]
    assert (whole.forward, whole.backward) == (forward.get_total_flops(), backward.get_total_flops())
    assert whole.macs == whole.forward // 2 > 0 and whole.seconds > 0
    kind = type(model).__name__
    for name, counts in forward.get_flop_counts().items():
        if name.startswith(f"{kind}."):
            assert profile[name.removeprefix(f"{kind}.")].forward == sum(counts.values()), name
    assert whole.parameters == sum(param.numel() for param in model.parameters())
    assert whole.seconds >= max(module.seconds for module in profile.values())
    engine.close()


# The others count by the same code; what differs is how their models are written.
@pytest.mark.parametrize(
    "make", [_gpt, pytest.param(_gpt2, marks=pytest.mark.full), pytest.param(_llama, marks=pytest.mark.full)]
)
def test_operations_are_those_that_torch_counts(ranks, make):
    ranks(2).run(_flops, make)


def test_a_forward_that_is_timed_leaves_nothing_behind():
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.norm = blocks, nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.blocks[0](x))

    model = Net()
    before, random = {name: value.clone() for name, value in model.named_buffers()}, torch.get_rng_state()
    found = latencies(model, (torch.randn(3, 4),), {})
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert not torch.equal(torch.get_rng_state(), random), "the input was drawn"
    after = torch.get_rng_state()
    latencies(model, (torch.ones(3, 4),), {})
    assert torch.equal(torch.get_rng_state(), after)
    assert found["blocks"] == found["blocks.0"] >= found["blocks.0.0"] > 0 and found[""] >= found["blocks"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _unwritable(folder: str) -> None:
    model = nn.Linear(4, 4)
    (Path(folder) / "file").write_text("")
    below = str(Path(folder) / "file" / "below")
    for settings in (
        {"csv_monitor": {"enabled": True, "output_path": below}},
        {"dsgraph": {"metrics_file": below}},
        {"flops_profiler": {"enabled": True, "output_file": below}},
    ):
        with pytest.raises(dsgraph.ConfigError, match="cannot be written"):
            dsgraph.initialize(model=model, config={**config(0), **settings})
    assert type(model) is nn.Linear, "nothing was changed"


def test_what_cannot_be_written_is_said_before_anything_is_changed(ranks, tmp_path):
    ranks(1).run(_unwritable, str(tmp_path))


def _tensorboard(folder: str) -> None:
    settings = {"tensorboard": {"enabled": True, "output_path": folder, "job_name": "job"}}
    losses, _, _ = _train(settings, steps=2)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (Path(folder) / "job").iterdir()
    found = [
        (event.step, value.tensor.float_val[0])
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == "Train/Samples/train_loss"
    ]
    assert [step for step, _ in found] == [4, 8]
    assert [value for _, value in found] == pytest.approx(losses)


@pytest.mark.full  # an extra that need not be there; the scalars are those of the other files
def test_tensorboard_reads_the_scalars(ranks, tmp_path):
    ranks(1).run(_tensorboard, str(tmp_path))
