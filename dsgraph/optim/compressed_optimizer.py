"""An optimizer whose gradients, after a warm-up, are momenta that travel as signs: what 1-bit Adam and LAMB share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.rows import own_part
from dsgraph.partitioning.state import partition_states
from dsgraph.partitioning.transforms.compress import compress, own_chunk, ranks_of, stop_compressing, why_not_compressed
from dsgraph.partitioning.transforms.compression import Compression
from dsgraph.ranks.first_rank import print_notes
from dsgraph.utils.errors import EngineError

from .hooks import OptimizerHooks, evaluated

_ERRORS = ("worker_error", "owner_error")
FREEZE_STEP = 100_000
"""Steps of the warm-up where nobody sets them: DeepSpeed's default."""
NOT_THERE = {"eps_inside_sqrt": False, "amsgrad": False, "bias_correction": True, "max_grad_norm": 0.0}


@dataclass(frozen=True)
class Momentum:
    """A parameter whose gradient is the averaged momentum, in a step behind the warm-up.

    Attributes:
        param: The parameter.
        group: Its group.
        state: Its state.
        before: `[r, *]`, this rank's rows of the momentum before.
        now: `[r, *]`, of the momentum now.
    """

    param: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    before: Tensor
    now: Tensor


class CompressingOptimizer(OptimizerHooks, Optimizer):
    """The warm-up, the change to compression, and what a checkpoint takes of it.

    Subclasses call `prepare` when they are made.

    Attributes:
        freeze_step: Steps of the warm-up.
    """

    freeze_step: int

    def prepare(self, model: nn.Module, freeze_step: int, others: dict[str, Any]) -> None:
        """Takes down what all of them need.

        Args:
            model: Whose parameters are updated; it is partitioned when the optimizer steps.
            freeze_step: Steps of the warm-up, a whole number, 1 or more.
            others: What DeepSpeed's optimizers take besides.

        Raises:
            ValueError: One of them asks for what is not there, or `freeze_step` is no such number.
        """
        for key, usual in NOT_THERE.items():
            if others.get(key, usual) != usual:
                raise ValueError(f"{key}={others[key]!r} is not there: leave it out")
        is_number = isinstance(freeze_step, int | float) and not isinstance(freeze_step, bool)
        if not is_number or freeze_step < 1 or freeze_step % 1:
            raise ValueError(f"freeze_step is {freeze_step!r}; it takes a whole number of steps, 1 or more")
        if len({group["betas"][0] for group in self.param_groups}) > 1:
            raise ValueError("its groups have several beta1; momenta are compressed with one")
        self.freeze_step = int(freeze_step)
        self._model = (model,)
        self._scale = 1.0
        self._is_checked = False
        self._coefficients, self._written = torch.zeros(2), (0.0, 0.0)
        self._compressed: dict[Tensor, Compression] = {}

    @abstractmethod
    def warm_step(self) -> None:
        """A step of the warm-up."""

    @abstractmethod
    def freeze(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Takes down what the variance of a parameter is from here on."""

    @abstractmethod
    def compressed_step(self, momenta: list[Momentum]) -> None:
        """A step behind the warm-up: updates parameters. Momenta and errors are taken over behind it."""

    def set_scale(self, scale: float) -> None:
        """From here on losses are multiplied by `scale`; averaged momenta are not."""
        self._scale = scale
        self._write_coefficients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients and new errors: those of the last step stay."""
        super().zero_grad(set_to_none)
        for compression in self._compressed.values():
            compression.drop()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient. All ranks call it together.

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
                f"{type(self).__name__}: the warm-up is over at step {self.freeze_step}: from here on variances are "
                "frozen, and momentum travels as signs; compiled models are compiled once more"
            )
        return loss

    def after_load(self) -> None:
        """Compresses or not, as its state says, which was read from a checkpoint. All ranks call it together."""
        entries = self._entries()
        for param in self._compressed:
            stop_compressing(entries[param])
        self._compressed, self.is_compressing = {}, False
        if self._steps() >= self.freeze_step:
            had_errors = self._start()
            if not had_errors:
                print_notes(
                    f"{type(self).__name__}: the errors of compression, of another number of ranks, start at zero"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every optimizer; it goes on where the state left off."""
        super().load_state_dict(state_dict)
        self.after_load()

    def empty_state(self, param: Tensor, key: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """As of every optimizer; None for errors of another number of ranks."""
        if key not in _ERRORS:
            return super().empty_state(param, key, size, dtype)
        errors = _as_state(self._entries()[param], *self._no_errors(param))
        return errors[key] if size == errors[key].shape else None

    def _no_errors(self, param: Tensor) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(param.numel(), device=param.device)
        return zeros, torch.zeros_like(own_chunk(zeros, ranks_of(self._entries()[param])))

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
        """Has gradients compressed; whether errors were there to go on from."""
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
            momentum = momentum.full_tensor() if entry.spec.group else own_part(momentum)
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


def _as_state(entry: ParameterState, worker_error: Tensor, owner_error: Tensor) -> dict[str, Tensor]:
    """Errors as a checkpoint takes them: each rank has a part of one tensor."""
    mesh, numel = entry.param.device_mesh, entry.param.numel()
    shape = torch.Size([mesh.size(), numel])
    return {
        "worker_error": DTensor.from_local(
            worker_error.view(1, -1), mesh, [Shard(0)], run_check=False, shape=shape, stride=(numel, 1)
        ),
        "owner_error": DTensor.from_local(
            owner_error, mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,)
        ),
    }
