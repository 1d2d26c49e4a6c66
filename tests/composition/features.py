"""The table of features that are combined: how each changes a configuration, a model and a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Feature:
    """A feature.

    Attributes:
        name: As users know it.
        axis: A run has at most one feature of an axis.
        config: Sections of the configuration, merged into those of the other features.
        changes_numbers: True if one process without the feature computes something else.
        model: Changes the model; the one process does so as well.
        does: A thing that a run does besides training: "evaluate", "resume".
        layout: Ranks of each axis of parallelism.
        needs: A feature that is added to runs that have none of its axis.
    """

    name: str
    axis: str
    config: Mapping[str, Any] = field(default_factory=dict)
    changes_numbers: bool = False
    model: Callable[[nn.Module], nn.Module] | None = None
    does: str = ""
    layout: Mapping[str, int] = field(default_factory=dict)
    needs: str = ""


class Checkpointed(nn.Module):
    """A block whose forward is recomputed in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return checkpoint(self.block, x, angles, use_reentrant=False)


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features, generator=generator) / 8)
        self.up = nn.Parameter(torch.randn(linear.out_features, rank, generator=generator) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down.T @ self.up.T


def _recomputed(model: Any) -> Any:
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model


def _adapted(model: Any) -> Any:
    model.requires_grad_(False)
    for block in model.blocks:
        block = getattr(block, "block", block)
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


_DISK = {"device": "nvme", "nvme_path": "FOLDER"}
_SPARSE = {"mode": "fixed", "block": 16, "num_local_blocks": 1, "num_global_blocks": 1, "attention": "unidirectional"}
_MOQ = {
    "enabled": True,
    "quantize_bits": {"start_bits": 6, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
}

FEATURES = (
    *(Feature(f"ZeRO stage {stage}", "stage", {"zero_optimization": {"stage": stage}}) for stage in (1, 2, 3)),
    Feature("tensor slices", "tensor", layout={"tp": 2}),
    Feature(
        *("sequence parallelism", "sequence", {"parallel": {"sequence_parallel": True}}),
        layout={"tp": 2},
        needs="tensor slices",
    ),
    Feature("pipeline stages", "pipeline", layout={"pp": 2}),
    Feature("bf16", "precision", {"bf16": {"enabled": True}}, changes_numbers=True),
    Feature("fp16", "precision", {"fp16": {"enabled": True, "initial_scale_power": 8}}, changes_numbers=True),
    Feature("memory limit", "memory", {"dsgraph": {"memory_limit": 4_000_000}}),
    Feature("activation offload", "activations", {"activation_checkpointing": {"cpu_checkpointing": True}}),
    Feature("optimizer on disk", "optimizer offload", {"zero_optimization": {"offload_optimizer": _DISK}}),
    Feature(
        *("parameters on disk", "parameter offload", {"zero_optimization": {"offload_param": _DISK}}),
        needs="ZeRO stage 3",
    ),
    Feature("accumulation", "accumulation", {"gradient_accumulation_steps": 2}),
    Feature("blocks", "blocks", {"dsgraph": {"blocks": ["blocks"]}}),
    Feature("one graph", "blocks", {"dsgraph": {"blocks": "none"}}),
    Feature("uncompiled", "compile", {"dsgraph": {"compile": False}}),
    Feature("sparse attention", "attention", {"sparse_attention": _SPARSE}, changes_numbers=True),
    Feature(
        "1-bit Adam",
        "optimizer",
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 50}}},
        True,
    ),
    Feature("layer dropping", "layers", {"progressive_layer_drop": {"enabled": True, "theta": 0.5}}, True),
    Feature("quantized training", "weights", {"quantize_training": _MOQ}, changes_numbers=True),
    Feature("activation checkpointing", "recomputation", model=_recomputed),
    Feature("adapters", "adapters", changes_numbers=True, model=_adapted),
    Feature("checkpoints", "saving", does="resume"),
    Feature("evaluation", "evaluation", does="evaluate"),
)
BY_NAME = {feature.name: feature for feature in FEATURES}


@dataclass(frozen=True)
class Refusal:
    """Features that are refused together, by an error with this text.

    Attributes:
        features: All of them are in the run.
        error: Text of the error.
        why: The reason, for users.
        has_meaning: False if nothing could be computed with all these features, so no work would make them compatible.
    """

    features: frozenset[str]
    error: str
    why: str
    has_meaning: bool = True

    def applies(self, names: Sequence[str]) -> bool:
        return self.features <= set(names)


def pairs() -> list[tuple[str, str]]:
    """Return all pairs of features of different axes."""
    return [(one.name, other.name) for one, other in combinations(FEATURES, 2) if one.axis != other.axis]


def completed(names: Sequence[str]) -> tuple[str, ...]:
    """Return the features of a run, with those that they need."""
    axes = {BY_NAME[name].axis for name in names}
    needed = {BY_NAME[name].needs for name in names} - {""}
    return (*names, *(name for name in sorted(needed) if BY_NAME[name].axis not in axes))


def merged(*sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested sections as one."""
    found: dict[str, Any] = {}
    for section in sections:
        for key, value in section.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else value
    return found


def build(features: Sequence[Feature]) -> nn.Module:
    """Return the model, with the same values on all ranks."""
    torch.manual_seed(0)
    model: nn.Module = GPT(GPTConfig(vocab=32, width=32, heads=2, layers=2))
    for feature in sorted(features, key=lambda feature: feature.axis):
        if feature.model is not None:
            model = feature.model(model)
    return model


def _refused(*features: str, error: str, why: str, has_meaning: bool = True) -> Refusal:
    return Refusal(frozenset(features), error, why, has_meaning)


_FULL_MOMENTUM = "1-bit compression needs the full momentum on each rank"

REFUSED = (
    *(
        _refused(
            f"ZeRO stage {stage}",
            "parameters on disk",
            error="offload_param.device needs zero_optimization.stage 3",
            why="other stages keep parameters where they are used",
            has_meaning=False,
        )
        for stage in (1, 2)
    ),
    *(
        _refused(other, "1-bit Adam", error=_FULL_MOMENTUM, why="the momentum is sharded", has_meaning=False)
        for other in ("ZeRO stage 2", "ZeRO stage 3", "parameters on disk")
    ),
    _refused(
        *("optimizer on disk", "1-bit Adam"),
        error="compiled graphs read the momentum",
        why="the momentum must be on the device",
    ),
    _refused(
        *("uncompiled", "sparse attention"),
        error="only compiled attention can be block-sparse",
        why="a pass of the graph replaces the attention",
        has_meaning=False,
    ),
    _refused(
        *("quantized training", "adapters"),
        error="has no linear layer with a weight of its own",
        why="the layers of this model are frozen, and nothing is left to round",
        has_meaning=False,
    ),
)
