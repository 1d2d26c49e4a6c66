"""The arguments of a step of a pipeline, which must be like those of the example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsgraph.compat.tensors import flatten_tree
from dsgraph.partitioning.forward_inputs import cast_floating
from dsgraph.ranks.equal_batches import argument_name
from dsgraph.utils.errors import OptionError


class StepArguments:
    """The arguments of a step, of which each tensor has `microbatches` times the rows of the example."""

    def __init__(
        self,
        example: tuple[tuple[Any, ...], Mapping[str, Any]],
        *,
        inputs: Mapping[str, int],
        microbatches: int,
        loss_inside: bool,
        dtype: torch.dtype | None,
    ) -> None:
        """Set what is expected.

        Args:
            example: Arguments of one micro-batch.
            inputs: Placeholder of an argument in the captured graph -> its number among the leaves.
            microbatches: Number of micro-batches of a step.
            loss_inside: True if the model returns its loss, so that there is no target.
            dtype: Dtype of floating-point arguments, which are cast; None: that of the example.
        """
        leaves, self._spec = flatten_tree((example[0], dict(example[1])))
        self._leaves = [leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        names = {number: repr(argument_name(name)) for name, number in inputs.items()}
        self._names = [names.get(number, f"number {number}") for number in range(len(leaves))]
        self._count, self._loss_inside, self._dtype = microbatches, loss_inside, dtype

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
        return leaves

    def by_name(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return leaves by the names of the arguments, for errors."""
        return {name.strip("'"): leaf for name, leaf in zip(self._names, leaves, strict=True)}

    def _problem(self, leaf: Any, example: Any) -> str:
        """Return how a leaf differs from the example and what to do; empty if it does not."""
        if not isinstance(example, Tensor):
            is_same = not isinstance(leaf, Tensor) and leaf == example
            return "" if is_same else f"is {_described(leaf)}, and the example's was {example!r}: pass that value"
        if example.ndim == 0:
            return "has no dimension to split into micro-batches: pass a number, or add a dimension of rows"
        wanted = torch.Size((self._count * example.shape[0], *example.shape[1:]))
        if isinstance(leaf, Tensor) and leaf.shape == wanted and leaf.dtype == example.dtype:
            return ""
        rest = ", and drop the uneven rest of the data" if isinstance(leaf, Tensor) else ""
        return (
            f"is {_described(leaf)}, and {self._count} micro-batches of the example's shape are {example.dtype} of "
            f"shape {tuple(wanted)}: pass such a tensor{rest}"
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
