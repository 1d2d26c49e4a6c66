"""The base of 1-bit Adam and LAMB: after a warm-up, gradients are momenta that are sent as signs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.optim import Optimizer

from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.rows import gather_rows, own_part
from dsgraph.partitioning.state import held_by, partition_states
from dsgraph.partitioning.transforms.compress import compress, own_chunk, ranks_of, stop_compressing, why_not_compressed
from dsgraph.partitioning.transforms.compression import Compression
from dsgraph.ranks.first_rank import print_notes
from dsgraph.utils.errors import EngineError

from .hooks import OptimizerHooks, evaluated

_ERRORS = ("worker_error", "owner_error")
FREEZE_STEP = 100_000
"""Default number of warm-up steps: DeepSpeed's default."""
NOT_THERE = {"eps_inside_sqrt": False, "amsgrad": False, "bias_correction": True, "max_grad_norm": 0.0}


@dataclass(frozen=True)
class Momentum:
    """A parameter whose gradient is the averaged momentum, in a step after the warm-up.

    Attributes:
        param: The parameter.
        group: Its group.
        state: Its state.
        before: `[r, *]`, this rank's rows of the previous momentum.
        now: `[r, *]`, this rank's rows of the current momentum.
    """

    param: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    before: Tensor
    now: Tensor


class CompressingOptimizer(OptimizerHooks, Optimizer):
    """An optimizer with a warm-up followed by 1-bit compression.

    Subclasses call `prepare` in their constructor.

    Attributes:
        freeze_step: Steps of the warm-up.
    """

    own_keys: ClassVar[frozenset[str]] = frozenset(_ERRORS)

    freeze_step: int

    def prepare(self, model: nn.Module, freeze_step: int, others: dict[str, Any]) -> None:
        """Store the common arguments.

        Args:
            model: The model whose parameters are updated; it is partitioned when the optimizer steps.
            freeze_step: Number of warm-up steps, an integer, 1 or more.
            others: Further arguments of DeepSpeed's optimizers.

        Raises:
            ValueError: One of them is not supported, or `freeze_step` is not such a number.
        """
        for key, usual in NOT_THERE.items():
            if others.get(key, usual) != usual:
                raise ValueError(f"{key}={others[key]!r} is not supported: leave it out")
        is_number = isinstance(freeze_step, int | float) and not isinstance(freeze_step, bool)
        if not is_number or freeze_step < 1 or freeze_step % 1:
            raise ValueError(f"freeze_step is {freeze_step!r}; it takes a whole number of steps, 1 or more")
        if len({group["betas"][0] for group in self.param_groups}) > 1:
            raise ValueError("its groups have several beta1, but compression needs one: use the same in all groups")
        self.freeze_step = int(freeze_step)
        self._model = (model,)
        self._scale = 1.0
        self._is_checked = False
        self._coefficients, self._written = torch.zeros(2), (0.0, 0.0)
        self._compressed: dict[Tensor, Compression] = {}

    @abstractmethod
    def warm_step(self) -> None:
        """Make a step of the warm-up."""

    @abstractmethod
    def freeze(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Store the variance of a parameter, which no longer changes."""

    @abstractmethod
    def compressed_step(self, momenta: list[Momentum]) -> None:
        """Update parameters in a step after the warm-up; momenta and errors are taken over afterwards."""

    def set_scale(self, scale: float) -> None:
        """Note that losses are multiplied by `scale` from now on; averaged momenta are not."""
        self._scale = scale
        self._write_coefficients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients and new errors; the errors of the last step stay."""
        super().zero_grad(set_to_none)
        for compression in self._compressed.values():
            compression.drop()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. All ranks call it together.

        Raises:
            EngineError: A parameter's gradients cannot be compressed, or one has not been.
        """
        loss = evaluated(closure)
        self._check()
        if self.is_compressing:
            self.compressed_step(list(self._momenta()))
            for compression in self._compressed.values():
                compression.take_over()
            self._write_coefficients()
            return loss
        self.warm_step()
        if self._steps() >= self.freeze_step:
            for group in self.param_groups:
                for param in group["params"]:
                    if self.state.get(param):
                        self.freeze(self.state[param], group)
            self._start()
            print_notes(
                f"{type(self).__name__}: the warm-up is over at step {self.freeze_step}: from now on variances are "
                "frozen, and momentum is compressed to 1 bit; graphs that reduce gradients are compiled once more"
            )
        return loss

    def after_load(self) -> None:
        """Start or stop compression as the loaded state says. All ranks call it together."""
        entries = self._entries()
        for param in self._compressed:
            stop_compressing(entries[param])
        self._compressed, self.is_compressing = {}, False
        if self._steps() >= self.freeze_step:
            had_errors = self._start()
            if not had_errors:
                print_notes(
                    f"{type(self).__name__}: compression errors start at zero: another number of ranks saved them"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, like every optimizer, and continue from it."""
        super().load_state_dict(state_dict)
        self.after_load()

    def empty_state(self, param: Tensor, key: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return memory for a saved tensor, like every optimizer; None for errors of another number of ranks."""
        if key not in _ERRORS:
            return super().empty_state(param, key, size, dtype)
        errors = _as_state(self._entries()[param], *self._no_errors(param))
        return errors[key] if size == errors[key].shape else None

    def _no_errors(self, param: Tensor) -> tuple[Tensor, Tensor]:
        entry = self._entries()[param]
        zeros = torch.zeros(entry.spec.numel, device=param.device)
        return zeros, torch.zeros_like(own_chunk(zeros, ranks_of(entry)))

    def _check(self) -> None:
        if self._is_checked:
            return
        entries = self._entries()
        for param in self._params():
            if param not in entries:
                problem = "it holds a parameter of no partitioned model: call dsgraph.partition first"
            else:
                problem = why_not_compressed(entries[param])
            if problem:
                raise EngineError(f"{type(self).__name__}: {problem}; nothing was updated")
        self._is_checked = True

    def _params(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _steps(self) -> int:
        counts = [state["step"] for state in self.state.values() if "step" in state]
        return int(torch.stack(counts).max()) if counts else 0  # the host waits once, not for each

    def _entries(self) -> dict[Tensor, ParameterState]:
        (model,) = self._model
        return {entry.param: entry for state in partition_states(model) for entry in state.parameters}

    def _start(self) -> bool:
        """Start compression; return whether there were errors to continue from."""
        entries, params = self._entries(), list(self._params())
        self._coefficients, self._written = torch.zeros(2, device=params[0].device), (0.0, 0.0)
        self._write_coefficients()
        left, had_errors = [], True
        for param in params:
            entry, state = entries[param], self.state.get(param)
            if not state:
                left.append(entry.name)
                continue
            momentum = state["exp_avg"]
            momentum = gather_rows(momentum, entry.spec, _mesh_of(entry)) if entry.spec.group else own_part(momentum)
            known = [own_part(state[key]).view(-1) for key in _ERRORS if key in state]
            had_errors = had_errors and len(known) == len(_ERRORS)
            worker_error, owner_error = known if len(known) == len(_ERRORS) else self._no_errors(param)
            made = compress(entry, momentum.detach(), self._coefficients, (worker_error, owner_error))
            state.update(_as_state(entry, worker_error.detach(), owner_error.detach()))
            self._compressed[param] = made
        if left:
            print_notes(
                f"{type(self).__name__}: {', '.join(left)} had no gradient in the warm-up, and will not be updated"
            )
        self.is_compressing = True
        return had_errors

    def _write_coefficients(self) -> None:
        beta = self.param_groups[0]["betas"][0]
        wanted = (beta, (1 - beta) / self._scale)
        if wanted != self._written:
            self._coefficients.copy_(torch.tensor(wanted))
            self._written = wanted

    def _momenta(self) -> Iterator[Momentum]:
        for group in self.param_groups:
            for param in group["params"]:
                compression = self._compressed.get(param)
                if param.grad is None or compression is None:
                    continue
                if not compression.has_news():
                    raise EngineError(
                        f"{type(self).__name__}: the gradient of {compression.name!r} is no averaged momentum: it was "
                        "set by hand, or is of a forward that ran before the warm-up was over; nothing was updated"
                    )
                state = self.state[param]
                yield Momentum(param, group, state, own_part(state["exp_avg"]), own_part(param.grad))


def _mesh_of(entry: ParameterState) -> DeviceMesh:
    """Return the ranks that hold the same slice of a parameter."""
    return held_by(entry.owners[0][0]).partition.mesh


def _as_state(entry: ParameterState, worker_error: Tensor, owner_error: Tensor) -> dict[str, Tensor]:
    """Return errors as a checkpoint stores them: each rank has a part of one tensor."""
    mesh, numel = _mesh_of(entry), entry.spec.numel
    shape = torch.Size([mesh.size(), numel])
    return {
        "worker_error": DTensor.from_local(
            worker_error.view(1, -1), mesh, [Shard(0)], run_check=False, shape=shape, stride=(numel, 1)
        ),
        "owner_error": DTensor.from_local(
            owner_error, mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,)
        ),
    }
