"""The arguments of a step of a pipeline, which must be like those of the example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dsgraph.compat.tensors import flatten_tree
from dsgraph.partitioning.forward_inputs import cast_floating
from dsgraph.passes.parallel.stages.seed_draws import SEEDS
from dsgraph.ranks.equal_batches import argument_name
from dsgraph.utils.errors import OptionError


@dataclass(frozen=True)
class StepInputs:
    """The tensors of a step, by placeholders of a captured graph.

    Attributes:
        split: Tensors with the rows of all micro-batches.
        whole: Tensors that each micro-batch gets whole.
        count: Number of micro-batches.
    """

    split: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    count: int

    def all(self) -> dict[str, Tensor]:
        """Return all tensors of the step."""
        return {**self.split, **self.whole}

    def parts(self) -> list[dict[str, Tensor]]:
        """Return the tensors of each micro-batch."""
        chunks = {name: value.chunk(self.count) for name, value in self.split.items()}
        return [
            {**self.whole, **{name: parts[number] for name, parts in chunks.items()}} for number in range(self.count)
        ]


class StepArguments:
    """The arguments of a step: tensors that are split into micro-batches, and values that each micro-batch gets whole.

    A tensor with `microbatches` times the rows of the example is split along its first dimension. A tensor of the
    example's own shape, and one without dimensions, is passed whole. Values that are not tensors are constants of the
    captured graph.
    """

    def __init__(
        self,
        example: tuple[tuple[Any, ...], Mapping[str, Any]],
        inputs: Mapping[str, int],
        copies: DeviceMesh | None,
        *,
        count: int,
        loss_inside: bool,
        dtype: torch.dtype | None,
    ) -> None:
        """Set what is expected.

        Args:
            example: Arguments of one micro-batch.
            inputs: Placeholder of an argument in the captured graph -> its number among the leaves.
            copies: The data-parallel ranks; None without data parallelism.
            count: Number of micro-batches of a step.
            loss_inside: True if the model returns its loss, so that there is no target.
            dtype: Dtype of floating-point arguments, which are cast; None: that of the example.
        """
        leaves, self._spec = flatten_tree((example[0], dict(example[1])))
        self._leaves = [leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        names = {number: repr(argument_name(name)) for name, number in inputs.items()}
        self._names = [names.get(number, f"number {number}") for number in range(len(leaves))]
        self._count, self._loss_inside, self._dtype, self._copies = count, loss_inside, dtype, copies

    def leaves(
        self,
        call: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Tensor | None,
        *,
        needs_loss: bool = True,
    ) -> list[Any]:
        """Return the leaves of the arguments, after all checks.

        Args:
            call: The method that was called, for errors.
            args: Positional arguments.
            kwargs: Keyword arguments.
            target: The target of `loss_fn`.
            needs_loss: False if `target` may be left out.

        Raises:
            OptionError: Something differs from the example.
        """
        leaves, spec = flatten_tree(cast_floating((args, dict(kwargs)), self._dtype))
        if spec != self._spec:
            raise OptionError(
                f"pipeline.{call}: the arguments are {spec}, and the example was {self._spec}: pass the same arguments"
            )
        for name, leaf, example in zip(self._names, leaves, self._leaves, strict=True):
            problem = self._problem(leaf, example)
            if problem:
                raise OptionError(f"pipeline.{call}: argument {name} {problem}")
        if self._loss_inside and target is not None:
            raise OptionError(f"pipeline.{call}: without loss_fn the model returns its loss: leave target out")
        if not self._loss_inside and target is None and needs_loss:
            raise OptionError(f"pipeline.{call}: loss_fn needs target=")
        self._check_target(call, target)
        self._check_rows(call, leaves)
        return leaves

    def inputs(
        self, leaves: Sequence[Any], names: Mapping[str, int], device: torch.device, *, seeds: int
    ) -> StepInputs:
        """Return the tensors of a step on the device of the stages, and seeds for its random values.

        Args:
            leaves: The result of `leaves`.
            names: Placeholder of an argument in a captured graph -> its number among the leaves.
            device: The device.
            seeds: Number of random values of a micro-batch.
        """
        tensors = {name: leaves[number].to(device) for name, number in names.items()}
        whole = {name for name, number in names.items() if not self._is_split(leaves[number], self._leaves[number])}
        split = {name: value for name, value in tensors.items() if name not in whole}
        return StepInputs(
            {**split, SEEDS: self._seeds(seeds)} if seeds else split,
            {name: value for name, value in tensors.items() if name in whole},
            self._count,
        )

    def _seeds(self, number: int) -> Tensor:
        """Return the seeds of this rank's micro-batches (micro-batches, number), by one draw of the default generator.

        Data-parallel ranks with equal random states have the seeds of micro-batches that follow each other.
        """
        drawn = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
        ranks, rank = (1, 0) if self._copies is None else (self._copies.size(), self._copies.get_local_rank())
        seeds = torch.randint(1 << 62, (ranks * self._count, number), generator=drawn)
        return seeds[rank * self._count : (rank + 1) * self._count]

    def by_name(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return leaves by the names of the arguments, for errors."""
        return {name.strip("'"): leaf for name, leaf in zip(self._names, leaves, strict=True)}

    def _problem(self, leaf: Any, example: Any) -> str:
        """Return how a leaf differs from the example and what to do; empty if it does not."""
        if not isinstance(example, Tensor):
            is_same = not isinstance(leaf, Tensor) and leaf == example
            if is_same:
                return ""
            change = ", or, for a number that changes, a tensor without dimensions in the example and in each step"
            return (
                f"is {_described(leaf)}, and the example's was {example!r}: pass that value"
                f"{change if isinstance(example, (int, float)) else ''}"
            )
        if isinstance(leaf, Tensor) and leaf.dtype == example.dtype and leaf.shape == example.shape:
            return ""
        if not example.ndim:
            return f"is {_described(leaf)}, and the example's was {_described(example)}: pass such a tensor"
        if self._is_split(leaf, example) and leaf.dtype == example.dtype:
            return ""
        rest = ", and drop the uneven rest of the data" if isinstance(leaf, Tensor) else ""
        return (
            f"is {_described(leaf)}, and {self._count} micro-batches of the example's shape are {example.dtype} of "
            f"shape {tuple(self._rows_of(example))}: pass such a tensor{rest}; or one of shape {tuple(example.shape)}, "
            "which each micro-batch gets whole"
        )

    def _rows_of(self, example: Tensor) -> torch.Size:
        """Return the shape of a complete batch."""
        return torch.Size((self._count * example.shape[0], *example.shape[1:]))

    def _is_split(self, leaf: Any, example: Any) -> bool:
        """Return True if a tensor has the rows of all micro-batches."""
        return isinstance(leaf, Tensor) and example.ndim > 0 and leaf.shape == self._rows_of(example)

    def _check_rows(self, call: str, leaves: Sequence[Any]) -> None:
        """Raise an error if each micro-batch would get the same rows: the arguments are probably those of one."""
        given = [(leaf, like) for leaf, like in zip(leaves, self._leaves, strict=True) if isinstance(like, Tensor)]
        if any(like.ndim for _, like in given) and not any(self._is_split(leaf, like) for leaf, like in given):
            raise OptionError(
                f"pipeline.{call}: all tensors have the shapes of the example, which is one micro-batch, and there are "
                f"{self._count}: pass the complete batch, in which an argument has {self._count} times the rows of the "
                "example, and drop the uneven rest of the data"
            )

    def _check_target(self, call: str, target: Any) -> None:
        if target is None or (isinstance(target, Tensor) and target.ndim and not target.shape[0] % self._count):
            return
        raise OptionError(
            f"pipeline.{call}: target is {_described(target)}: pass a tensor whose number of rows is a multiple of "
            f"{self._count}, the number of micro-batches"
        )


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
