"""What an engine does with weights alone: out to Hugging Face's files, and in from them."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from dsgraph.checkpoint import hugging_face

SHARD_BYTES = 5 * 10**9
"""Bytes of a file of weights, at most, unless the caller says otherwise: what transformers writes."""


class Weights:
    """The weights of an engine, which has these attributes."""

    module: nn.Module
    optimizer: Optimizer

    def export(
        self, folder: str | PathLike[str], *, shard_bytes: int = SHARD_BYTES, dtype: torch.dtype | None = None
    ) -> None:
        """Writes the model as safetensors, and `config.json` where it is a transformers model. All ranks call it.

        `transformers.AutoModel*.from_pretrained(folder)` loads it. No rank gathers the whole model: files take turns
        among ranks. Of tied weights one is written; buffers are those of the rank that writes them.

        Args:
            folder: Where to; not there yet, or empty.
            shard_bytes: Bytes of a file, at most.
            dtype: Dtype of floating-point weights; None: that of the shards, which are the masters.

        Raises:
            CheckpointError: The folder is not empty, a rank could not write, or a load or step that failed has left on
                disk what is neither old nor new; all ranks raise.
        """
        hugging_face.export(self, Path(folder), shard_bytes=shard_bytes, dtype=dtype)

    def load_pretrained(self, folder: str | PathLike[str]) -> None:
        """Reads the safetensors of `save_pretrained` or `export` into the shards. All ranks call it together.

        Each rank reads its rows alone. Optimizer, schedule and counts stay as they are.

        Args:
            folder: Has `*.safetensors`, with the names of the model's `state_dict`.

        Raises:
            CheckpointError: A weight is missing or has another shape; all ranks raise, and the model is as it was. Or
                a disk failed amid reading: with parameters on disk the model runs no more until it has loaded.
        """
        hugging_face.load_pretrained(self, Path(folder))
