"""The compiled graphs of an engine: encoder inputs, prompts, single tokens, and whole sequences without a cache."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from dsgraph.compat.compiled import allowing_recompiles, backend_named
from dsgraph.compat.dynamo import not_capturable
from dsgraph.utils.device_clock import Spans
from dsgraph.utils.errors import InferenceError

from .inference_report import Counts


class Graphs:
    """The compiled forwards of a model, one for each kind of call, with counts."""

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        """Create the graphs; nothing is compiled yet.

        Args:
            model: A model of transformers.
            options: Options of the backend.
        """
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        (self._device,) = {param.device for param in model.parameters()}
        functions: dict[str, Callable[..., Any]] = {
            **{"encode": self._encode, "prompt": self._prompt},
            **{"decode": self._decode, "forward": self._forward},
        }
        self._counts = {kind: Counts() for kind in (*functions, "uncompiled")}
        self._spans = {kind: Spans(self._device) for kind in self._counts}
        self._functions = functions
        self._compiled: dict[str, Callable[..., Any]] = {
            kind: torch.compile(
                function, backend=_Counting(self._counts[kind]), fullgraph=True, dynamic=False, options=dict(options)
            )
            for kind, function in functions.items()
        }
        self._compiled["uncompiled"] = model
        self._lock = threading.RLock()
        self._own = threading.local()

    def counts(self) -> dict[str, Counts]:
        """Return the calls by kind: "encode", "prompt", "decode", "forward"; "uncompiled" for calls without a graph.

        Waits until a GPU has run them.
        """
        with self._lock:
            seconds = {kind: spans.milliseconds() / 1000 for kind, spans in self._spans.items()}
            return {kind: replace(counts, seconds=seconds[kind]) for kind, counts in self._counts.items()}

    def run(self, kind: str, *arguments: Any, tokens: int) -> Any:
        """Run the graph for these shapes, and compile it first if there is none. Threads run one graph at a time.

        Args:
            kind: A key of `counts()`.
            *arguments: Arguments of the method of that name.
            tokens: Number of tokens, for the tokens per second.

        Raises:
            InferenceError: The model's forward cannot be captured as one graph.
        """
        if getattr(self._own, "is_plain", False):
            with torch.no_grad():
                return self._functions[kind](*arguments)
        with self._lock:
            return self._run(kind, *arguments, tokens=tokens)

    def run_plain(self, given: Mapping[str, Any], *, tokens: int) -> Any:
        """Call the model itself, uncompiled, and count it as "uncompiled"."""
        with self._lock:
            return self._run("uncompiled", tokens=tokens, **given)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run all calls of this thread uncompiled and uncounted in a `with` block."""
        self._own.is_plain = True
        try:
            yield
        finally:
            self._own.is_plain = False

    def _run(self, kind: str, *arguments: Any, tokens: int, **named: Any) -> Any:
        counts, spans = self._counts[kind], self._spans[kind]
        compiled = counts.compiles
        began = spans.begin()
        try:
            with allowing_recompiles(), torch.no_grad():
                found = self._compiled[kind](*arguments, **named)
        except not_capturable() as error:
            raise InferenceError(
                f"{type(self._model).__name__}: its forward cannot be captured as one graph "
                f"({str(error).splitlines()[0]}): call engine.module, or the model without an engine"
            ) from error
        counts.calls += 1
        if counts.compiles == compiled:
            counts.tokens += tokens
            spans.end(began)
        return found

    def _encode(self, given: dict[str, Any]) -> Tensor:
        """Return hidden states (rows, length, width) of an encoder whose decoder generates."""
        return self._model.get_encoder()(**given).last_hidden_state

    def _prompt(self, given: dict[str, Any], last: Tensor) -> Tensor:
        """Return logits (rows, 1, vocabulary) after position `last`, an index (1,)."""
        if self._keeps_logits:
            return self._model(**given, use_cache=True, logits_to_keep=last).logits
        return self._model(**given, use_cache=True).logits[:, last]

    def _decode(self, given: dict[str, Any]) -> Tensor:
        """Return logits (rows, 1, vocabulary) after one token a row."""
        return self._model(**given, use_cache=True).logits

    def _forward(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors that the model returns for whole sequences, by name."""
        found = self._model(**given)
        return {name: found[name] for name in found.keys() if isinstance(found[name], Tensor)}  # noqa: SIM118


class _Counting:
    """The backend "dsgraph", counting compiles."""

    __name__ = "dsgraph"

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        self._counts.compiles += 1
        return backend_named("dsgraph")(gm, inputs, **options)
