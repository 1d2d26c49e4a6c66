"""The compiled graphs of an engine: prompts, single tokens, and whole sequences without a cache."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsgraph import compat

from .cache import CACHE_NAME
from .report import Counts


class Graphs:
    """Compiles a model's forward for each kind of call, and counts.

    Attributes:
        counts: By kind: "prompt", "decode", "forward".
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Compiles nothing yet.

        Args:
            model: A causal model of transformers.
            options: Of the backend.
        """
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.counts = {kind: Counts() for kind in ("prompt", "decode", "forward")}
        self._compiled = {
            kind: torch.compile(
                function, backend=_Counting(self.counts[kind]), fullgraph=True, dynamic=False, options=dict(options)
            )
            for kind, function in (("prompt", self._prompt), ("decode", self._decode), ("forward", self._forward))
        }

    def run(self, kind: str, *arguments: Any, tokens: int) -> Tensor:
        """Runs a graph, which is compiled if there is none for these shapes.

        Args:
            kind: "prompt", "decode" or "forward".
            *arguments: Of the method of that name.
            tokens: What counts for tokens a second.
        """
        counts = self.counts[kind]
        compiled = counts.compiles
        started = time.perf_counter()
        with compat.allowing_recompiles(), torch.no_grad():
            logits = self._compiled[kind](*arguments)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        counts.calls += 1
        if counts.compiles == compiled:
            counts.tokens += tokens
            counts.seconds += time.perf_counter() - started
        return logits

    def _prompt(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, last: Tensor) -> Tensor:
        """Logits (rows, 1, words) behind position `last`, an index (1,)."""
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE_NAME: cache}
        if self._keeps_logits:
            return self._model(**given, use_cache=True, logits_to_keep=last).logits
        return self._model(**given, use_cache=True).logits[:, last]

    def _decode(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits (rows, 1, words) behind `ids` (rows, 1)."""
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE_NAME: cache}
        return self._model(**given, use_cache=True).logits

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits (rows, length, words) of whole sequences."""
        return self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits


class _Counting:
    """The backend "dsgraph", counting compiles."""

    __name__ = "dsgraph"

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        self._counts.compiles += 1
        return compat.backend_named("dsgraph")(gm, inputs, **options)
