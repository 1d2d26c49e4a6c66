"""Ranks that share a batch compare their inputs in the first steps: different data would give wrong gradients."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsgraph.utils.errors import OptionError, RanksDisagreeError

from .agreement import Agreement

CHECKED_STEPS = 3

_BATCHES = (
    "These ranks hold parts of one model and need the same rows: give all of them the same batch. A sampler must split "
    "the data over data-parallel ranks only"
)
_SEEDS = "needs equal random states: call torch.manual_seed(seed) with the same seed on these ranks"


class EqualBatches:
    """A comparison of batches between ranks in the first steps of each kind.

    These steps cost a checksum of the batch and a message through the store; later steps cost nothing.
    """

    def __init__(self, pipeline: Agreement | None, slicing: Agreement | None, copies: Agreement | None = None) -> None:
        """Set the ranks that are given equal batches.

        Args:
            pipeline: The ranks that hold a model's stages.
            slicing: The tensor-parallel ranks, which also draw equal random numbers.
            copies: The data-parallel ranks. Their batches may differ; they learn that one was refused.
        """
        self._agreements = [one for one in (pipeline, slicing, copies) if one is not None and len(one.ranks) > 1]
        self._slicing, self._copies = slicing, copies
        self._seen: Counter[Hashable] = Counter()

    def is_due(self, kind: Hashable) -> bool:
        """Count a step of a kind (shapes, autocast); return True if it is among the first, which are compared."""
        self._seen[kind] += 1
        return bool(self._agreements) and self._seen[kind] <= CHECKED_STEPS

    def compare(self, kind: Hashable, values: Mapping[str, Any]) -> None:
        """Compare a batch with those of the other ranks. All of them call it.

        Args:
            kind: Key of the steps that are counted together.
            values: The tensors of the batch by name.

        Raises:
            RanksDisagreeError: Batches differ; raised on all ranks, with two ranks and the first argument that differs.
        """
        lines, refused = [str(kind), *_described(values)], None
        for agreement in self._agreements:
            own = [str(refused)] if refused is not None else lines if agreement is not self._copies else []
            try:  # the ranks of the following agreements wait for this one
                agreement.confirm("compute with different batches", own, advice=_BATCHES)
            except RanksDisagreeError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    @contextmanager
    def refusals(self, kind: Hashable) -> Iterator[None]:
        """Compare an error of this rank, which refuses its batch, with the batches of the ranks that wait for it."""
        try:
            yield
        except OptionError as error:
            self.compare(f"{kind}, refused: {error}", {})
            raise

    def compare_random_numbers(self, device: torch.device, state: Tensor, *, samples: bool = False) -> None:
        """Compare the random state with those of the other tensor-parallel ranks. All of them call it.

        Args:
            device: The device of the generator.
            state: Its state.
            samples: True if the ranks sample tokens. The ranks of the pipeline are then compared as well.

        Raises:
            RanksDisagreeError: Random states differ; raised on all ranks, with the names of two.
        """
        line = f"random numbers of {device.type} with checksum {_digest(state)}"
        for agreement in self._agreements if samples else [self._slicing]:
            if agreement is not None and agreement is not self._copies:
                what = "Sampling" if samples else "Dropout of a tensor-parallel value"
                agreement.confirm("draw different random numbers", [line], advice=f"{what} {_SEEDS}")


def random_state(device: torch.device) -> Tensor:
    """Return the state of a device's default generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _described(values: Mapping[str, Any]) -> list[str]:
    """Return a line for each tensor with its name, dtype, shape and checksum."""
    return [
        f"{argument_name(name)}: {value.dtype} {list(value.shape)} with checksum {_digest(value)}"
        for name, value in values.items()
        if isinstance(value, Tensor) and not value.is_meta
    ]


def argument_name(name: str) -> str:
    """Return the user's name for a name of Dynamo such as `l_input_ids_`."""
    return re.sub(r"^[lL]_((kw)?args_)?|_$", "", name)


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(content).hexdigest()[:12]
