"""The compiled graphs of an engine: what is encoded, prompts, single tokens, and whole sequences without a cache."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from dsgraph import compat

from .report import Counts


class Graphs:
    """Compiles a model's forward for each kind of call, and counts.

    Attributes:
        counts: By kind: "encode", "prompt", "decode", "forward".
    """

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        """Compiles nothing yet.

        Args:
            model: Of transformers.
            options: Of the backend.
        """
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        (self._device,) = {param.device for param in model.parameters()}
        functions: dict[str, Callable[..., Any]] = {
            **{"encode": self._encode, "prompt": self._prompt},
            **{"decode": self._decode, "forward": self._forward},
        }
        self.counts = {kind: Counts() for kind in functions}
        self._compiled = {
            kind: torch.compile(
                function, backend=_Counting(self.counts[kind]), fullgraph=True, dynamic=False, options=dict(options)
            )
            for kind, function in functions.items()
        }

    def run(self, kind: str, *arguments: Any, tokens: int) -> Any:
        """Runs a graph, which is compiled if there is none for these shapes.

        Args:
            kind: One of `counts`.
            *arguments: Of the method of that name.
            tokens: What counts for tokens a second.
        """
        counts = self.counts[kind]
        compiled = counts.compiles
        started = time.perf_counter()
        with compat.allowing_recompiles(), torch.no_grad():
            found = self._compiled[kind](*arguments)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        counts.calls += 1
        if counts.compiles == compiled:
            counts.tokens += tokens
            counts.seconds += time.perf_counter() - started
        return found

    def _encode(self, given: dict[str, Any]) -> Tensor:
        """Hidden states (rows, length, width) of an encoder whose decoder generates."""
        return self._model.get_encoder()(**given).last_hidden_state

    def _prompt(self, given: dict[str, Any], last: Tensor) -> Tensor:
        """Logits (rows, 1, words) behind position `last`, an index (1,)."""
        if self._keeps_logits:
            return self._model(**given, use_cache=True, logits_to_keep=last).logits
        return self._model(**given, use_cache=True).logits[:, last]

    def _decode(self, given: dict[str, Any]) -> Tensor:
        """Logits (rows, 1, words) behind one token a row."""
        return self._model(**given, use_cache=True).logits

    def _forward(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors that the model returns for whole sequences, by name."""
        found = self._model(**given)
        return {name: found[name] for name in found.keys() if isinstance(found[name], Tensor)}  # noqa: SIM118


class _Counting:
    """The backend "dsgraph", counting compiles."""

    __name__ = "dsgraph"

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        self._counts.compiles += 1
        return compat.backend_named("dsgraph")(gm, inputs, **options)
