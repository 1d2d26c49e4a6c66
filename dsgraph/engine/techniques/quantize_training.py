"""The configuration's `quantize_training` (MoQ): quantization-aware training with fewer and fewer bits.

Weights of linear layers are rounded from update number O (the offset) on. A weight has `start_bits` first. After P such
steps (the period) it loses a bit, and P doubles; so on until `target_bits`. With `eigenvalue`, P is also multiplied by
1 + floor(4 s), where s is the block's largest eigenvalue over the largest of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.inference.quantization.quantize import is_linear
from dsgraph.partitioning.blocks.repeated_blocks import repeated_blocks
from dsgraph.partitioning.state import PartitionState
from dsgraph.partitioning.transforms.fake_weight import FakeWeight
from dsgraph.passes.ir.parameters import ParameterSlice
from dsgraph.ranks.first_rank import print_notes
from dsgraph.utils.errors import ConfigError
from dsgraph.utils.nearest import nearest

from .eigenvalues import Gradients, largest_eigenvalue, shares_of_largest

Collect = Callable[[], Gradients]
"""A function that returns one which computes gradients of the last micro-batch's loss."""


@dataclass
class Progress:
    """The position of one weight in the schedule, as JSON values.

    Attributes:
        bits: Its number of bits.
        period: Number of quantized steps after which it loses the next bit.
        share: Share of the unrounded weight in the weight of the forward.
    """

    bits: int
    period: int
    share: float = 0.0


@dataclass(eq=False)
class _Weight:
    transposed: bool
    block: str
    progress: Progress
    control: Tensor = field(default_factory=lambda: torch.zeros(3))


class QuantizedTraining:
    """The quantized weights, and the schedule of their bits.

    Attributes:
        steps: Quantized steps so far.
        eigenvalues: Name of a block -> its eigenvalue over the largest one, as far as they were computed.
    """

    def __init__(self, settings: EngineConfig, model: nn.Module) -> None:
        """Find the weights.

        Args:
            settings: The configuration.
            model: Not yet partitioned.

        Raises:
            ConfigError: There are no such weights or blocks, or the section contradicts itself or another one.
        """
        self._config = config = settings.quantize_training
        self.steps, self._past_offset, self.eigenvalues = 0, 0, dict[str, float]()
        self._symmetric = _one_of(config.quantize_algo.q_type, config.quantize_type, "symmetric") == "symmetric"
        rounding = _one_of(config.quantize_algo.rounding, config.quantize_rounding, "nearest")
        self._stochastic = rounding == "stochastic"
        bits = config.quantize_bits
        if bits.target_bits > bits.start_bits:
            raise ConfigError(
                f"quantize_training.quantize_bits: target_bits {bits.target_bits} is above start_bits "
                f"{bits.start_bits}, and bits become fewer: swap them"
            )
        if config.eigenvalue.enabled and settings.optimizer is not None and "onebit" in settings.optimizer.type.lower():
            raise ConfigError(
                "quantize_training.eigenvalue needs gradients, and a 1-bit optimizer reduces momenta: remove one"
            )
        self.blocks = _blocks(settings, model) if config.eigenvalue.enabled else {}
        self._weights = self._found(model)
        low = settings.bf16.enabled or settings.fp16.enabled
        dtype = torch.bfloat16 if settings.bf16.enabled else torch.float16 if low else torch.float32
        self._precision = torch.finfo(dtype).eps
        self._write()

    @classmethod
    def of(cls, settings: EngineConfig, model: nn.Module) -> QuantizedTraining | None:
        """Return the weights, and print a line about them; None if the configuration quantizes none."""
        if not settings.quantize_training.enabled:
            return None
        found = cls(settings, model)
        print_notes(found.note())
        return found

    def _found(self, model: nn.Module) -> dict[str, _Weight]:
        schedule, bits = self._config.quantize_schedule, self._config.quantize_bits
        others = {id(p) for m in model.modules() if not is_linear(m) for p in m.parameters(recurse=False)}
        found = {}
        for name, module in model.named_modules():
            if not is_linear(module) or id(module.weight) in others or not module.weight.requires_grad:
                continue
            others.add(id(module.weight))  # a second layer with this weight reads the first one's rounded weight
            groups, size = self._config.quantize_groups, module.weight.numel()
            if groups and size % groups:
                raise ConfigError(
                    f"quantize_training.quantize_groups: {groups} parts do not divide the {size} numbers of {name!r}"
                )
            block = next((one for one in self.blocks if name == one or name.startswith(f"{one}.")), "")
            progress = Progress(bits.start_bits, schedule.quantize_period, self._first_share())
            found[name] = _Weight(type(module) is not nn.Linear, block, progress)
        if not found:
            raise ConfigError(f"quantize_training: {type(model).__name__} has no linear layer with a weight of its own")
        return found

    def _first_share(self) -> float:
        return 1.0 if self._config.fp16_mixed_quantize.enabled else 0.0

    def take_over(self, partition: PartitionState, slices: Mapping[str, ParameterSlice] | None = None) -> None:
        """Let the modules of a partitioned model, or the stages of this rank, compute with rounded weights.

        Args:
            partition: The parameters that this rank has; it may lack some of the weights.
            slices: The parameters of which stages have a slice, by name.
        """
        entries = {entry.name: entry for entry in partition.parameters}
        for name, weight in self._weights.items():
            weight.control = weight.control.to(partition.parameters[0].param.device)
            entry = entries.get(f"{name}.weight".lstrip("."))
            if entry is not None:
                groups, held = self._config.quantize_groups or 0, entry.spec.held or (slices or {}).get(entry.name)
                entry.register(
                    FakeWeight(weight.control, groups, weight.transposed, self._symmetric, self._stochastic, held)
                )

    def note(self) -> str:
        """Return the line that is printed about quantization."""
        bits, schedule = self._config.quantize_bits, self._config.quantize_schedule
        return (
            f"quantize_training: {len(self._weights)} weights of linear layers, {bits.start_bits} to {bits.target_bits}"
            f" bits, from step {schedule.schedule_offset} on; norms, embeddings and what is tied to them stay"
        )

    def bits(self) -> dict[str, int]:
        """Return name of a layer -> bits that its weight has once quantization has begun."""
        return {name: weight.progress.bits for name, weight in self._weights.items()}

    def after_step(self, collect: Collect | None) -> None:
        """Update the schedule after the optimizer has updated the weights. All ranks call it together.

        Args:
            collect: See `Collect`; needed for eigenvalues only.
        """
        self._past_offset += 1
        self.steps = max(self._past_offset - self._config.quantize_schedule.schedule_offset, 0)
        if self.steps:
            self._pass_on()
            due = [name for name, weight in self._weights.items() if self._is_due(weight.progress)]
            if due and self.blocks and self._past_offset % self._config.eigenvalue.gas_boundary_resolution == 0:
                assert collect is not None, "pipeline stages refuse eigenvalues"
                self._look(collect())
            for name in due:
                self._lose_a_bit(name)
        self._write()

    def _pass_on(self) -> None:
        mixed = self._config.fp16_mixed_quantize
        for weight in self._weights.values():
            if mixed.enabled:
                weight.progress.share = max(weight.progress.share - mixed.quantize_change_ratio, 0.0)

    def _is_due(self, progress: Progress) -> bool:
        return progress.bits > self._config.quantize_bits.target_bits and self.steps >= progress.period

    def _lose_a_bit(self, name: str) -> None:
        weight = self._weights[name]
        share = self.eigenvalues.get(weight.block)
        now = weight.progress
        period = 2 * now.period * (1 if share is None else 1 + math.floor(4 * share))
        weight.progress = Progress(now.bits - 1, period, self._first_share())
        if self._config.quantize_verbose:
            print_notes(
                f"quantize_training: step {self.steps}: {name} has {now.bits - 1} bits, the next goes at {period}"
            )

    def _write(self) -> None:
        """Write the number of bits to the tensors that graphs read."""
        begun = self._past_offset >= self._config.quantize_schedule.schedule_offset
        for number, weight in enumerate(self._weights.values()):
            now = weight.progress
            levels = 2 ** (now.bits - 1) - 1 if self._symmetric else 2**now.bits - 1
            seed = (self._past_offset * 9973 + number * 7919) % 2**24
            weight.control.copy_(torch.tensor([levels, now.share if begun else 1.0, seed]))

    def _look(self, gradients: Gradients) -> None:
        """Compute the eigenvalues of the weights without rounding, which has no slope."""
        config = self._config.eigenvalue
        for weight in self._weights.values():
            weight.control[1] = 1.0
        found = {
            name: largest_eigenvalue(
                dict(block.named_parameters()),
                lambda name=name: {  # type: ignore[misc]
                    key[len(name) + 1 :]: value for key, value in gradients().items() if key.startswith(f"{name}.")
                },
                max_iter=config.max_iter,
                tol=config.tol,
                stability=config.stability,
                precision=self._precision,
            )
            for name, block in self.blocks.items()
        }
        self.eigenvalues = dict(zip(found, shares_of_largest(list(found.values())), strict=True))
        if config.verbose:
            for name, value in found.items():
                print_notes(f"eigenvalue: {name}: {value:.4g}, {self.eigenvalues[name]:.3f} of the largest")

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule, as JSON values."""
        weights = {name: asdict(weight.progress) for name, weight in self._weights.items()}
        return {"past_offset": self._past_offset, "weights": weights, "eigenvalues": self.eigenvalues}

    def why_not(self, state: Mapping[str, Any] | None) -> str:
        """Return why `load_state_dict` cannot load a result of `state_dict`; empty if it can."""
        if state is None:
            return "it holds no schedule of quantize_training, which the engine has"
        return "" if set(state["weights"]) == set(self._weights) else "it has quantised other weights"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another run."""
        self._past_offset, self.eigenvalues = state["past_offset"], dict(state["eigenvalues"])
        self.steps = max(self._past_offset - self._config.quantize_schedule.schedule_offset, 0)
        for name, weight in self._weights.items():
            weight.progress = Progress(**state["weights"][name])
        self._write()


def _one_of(nested: str | None, plain: str, default: str) -> str:
    if nested is not None and plain not in (default, nested):
        raise ConfigError(
            f"quantize_training: quantize_algo holds {nested!r}, and the key next to it {plain!r}: leave one out"
        )
    return nested or plain


def _blocks(settings: EngineConfig, model: nn.Module) -> dict[str, nn.Module]:
    config, lists = settings.quantize_training.eigenvalue, dict(repeated_blocks(model))
    if config.layer_name is not None and config.layer_name not in lists:
        raise ConfigError(
            f"quantize_training.eigenvalue.layer_name is {config.layer_name!r}, which is no list of equal blocks"
            f"{nearest(config.layer_name, list(lists))}; there are {', '.join(lists) or 'none'}"
        )
    names = [config.layer_name] if config.layer_name is not None else list(lists)
    found = {f"{name}.{key}": block for name in names for key, block in lists[name].items()}
    if not found:
        raise ConfigError("quantize_training.eigenvalue: the model has no list of equal blocks: switch it off")
    if config.layer_num and config.layer_num != len(found):
        raise ConfigError(
            f"quantize_training.eigenvalue.layer_num is {config.layer_num}, and {', '.join(names)} has {len(found)}"
        )
    return found
