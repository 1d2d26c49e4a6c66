"""The arguments of a step of a pipeline, which must be like those of the example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsgraph.compat.tensors import flatten_tree
from dsgraph.partitioning.forward_inputs import cast_floating
from dsgraph.utils.errors import OptionError


class StepArguments:
    """Checks the arguments of a complete batch: `microbatches` times the rows of the example."""

    def __init__(
        self,
        example: tuple[tuple[Any, ...], Mapping[str, Any]],
        *,
        microbatches: int,
        loss_inside: bool,
        dtype: torch.dtype | None,
    ) -> None:
        """Set what is expected.

        Args:
            example: Arguments of one micro-batch.
            microbatches: Number of micro-batches of a step.
            loss_inside: True if the model returns its loss, so that there is no target.
            dtype: Dtype of floating-point arguments, which are cast; None: that of the example.
        """
        leaves, self._spec = flatten_tree((example[0], dict(example[1])))
        self._leaves = [leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._count, self._loss_inside, self._dtype = microbatches, loss_inside, dtype

    def leaves(self, call: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Tensor | None) -> list[Any]:
        """Return the leaves of the arguments, after all checks.

        Args:
            call: The method that was called, for errors.
            args: Positional arguments.
            kwargs: Keyword arguments.
            target: The target of `loss_fn`.

        Raises:
            OptionError: Something differs from the example.
        """
        leaves, spec = flatten_tree(cast_floating((args, dict(kwargs)), self._dtype))
        count = self._count
        if spec != self._spec:
            raise OptionError(f"pipeline.{call}: the arguments are {spec}, those of the example were {self._spec}")
        for number, (leaf, example) in enumerate(zip(leaves, self._leaves, strict=True)):
            if not isinstance(example, Tensor):
                if leaf != example:
                    raise OptionError(f"pipeline.{call}: argument {number} is {leaf!r}, the example's was {example!r}")
                continue
            wanted = (count * example.shape[0], *example.shape[1:]) if example.ndim else ()
            if example.ndim == 0 or tuple(leaf.shape) != wanted or leaf.dtype != example.dtype:
                raise OptionError(
                    f"pipeline.{call}: argument {number} is {leaf.dtype} of shape {tuple(leaf.shape)}, "
                    f"{count} micro-batches of the example's shape are {example.dtype} of {wanted}: "
                    "drop the uneven rest of the data"
                )
        if self._loss_inside == (target is not None):
            is_given = "the model returns its loss: leave target out" if self._loss_inside else "loss_fn needs target="
            raise OptionError(f"pipeline.{call}: {is_given}")
        if target is not None and (target.ndim == 0 or target.shape[0] % count):
            raise OptionError(f"pipeline.{call}: target of shape {tuple(target.shape)} does not divide by {count}")
        return leaves
