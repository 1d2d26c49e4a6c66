"""An engine of models that encode whole sequences and generate nothing, such as BERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsgraph.utils.errors import InferenceError

from .engine import InferenceEngine
from .slicing_ranks import SlicingRanks

# Arguments of a forward that have one number a token.
_OF_TOKENS = ("token_type_ids", "position_ids")


class EncoderEngine(InferenceEngine):
    """The engine of an encoder: `engine(input_ids)` runs one graph for each padded length."""

    def __init__(
        self, module: Any, *, max_tokens: int, options: Mapping[str, Any], ranks: SlicingRanks | None = None
    ) -> None:
        """Run one token and two, to find the outputs that have one entry a token; nothing is compiled yet.

        Args:
            module: An encoder of transformers, in `eval()`.
            max_tokens: Largest number of tokens of a sequence.
            options: Options of the backend.
            ranks: The ranks that share each layer of `module`; None: this one has all of it.
        """
        super().__init__(module, max_tokens=max_tokens, options=options, ranks=ranks)
        self._made, self._lengthwise = _dimensions(module)

    def __call__(  # type: ignore[override]  # token types and positions are among the others
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> Any:
        """Return the model's output for whole sequences; the graph pads them to a bucket, and the padding is removed.

        Args:
            input_ids: (rows, length), of at most `max_tokens` tokens.
            attention_mask: (rows, length): 0 where a token is padding. None: none is.
            **others: `token_type_ids` and `position_ids`, (rows, length).

        Raises:
            InferenceError: The sequences are too long, or an argument is not supported.
        """
        whole = {"input_ids": input_ids}
        whole["attention_mask"] = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for name, value in others.items():
            if value is None or (name == "return_dict" and value is True):
                continue
            if name not in _OF_TOKENS:
                raise InferenceError(
                    f"engine: {name} is not supported: the graph computes outputs of tokens, {', '.join(_OF_TOKENS)}; "
                    "call engine.module"
                )
            whole[name] = value
        for name, value in whole.items():
            if value.ndim != 2 or value.shape[1] != input_ids.shape[1]:
                raise InferenceError(f"engine: {name} is {list(value.shape)}; it takes (rows, length) of input_ids")
        rows, length = input_ids.shape
        with self._turns:
            if self._ranks is not None:
                self._ranks.confirm("compute different batches", whole)
            found = self._graphs.run("forward", self._behind(whole), tokens=rows * length)
        for name, dimension in self._lengthwise.items():
            found[name] = found[name].narrow(dimension, 0, length)
        return self._made(**found)

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **arguments: Any) -> Any:
        """Refuse: encoders generate nothing.

        Raises:
            InferenceError: Always.
        """
        raise InferenceError(f"generate: {type(self.module).__name__} generates no tokens: call engine(input_ids)")


def _dimensions(module: Any) -> tuple[type[Any], dict[str, int]]:
    """Return the type of outputs, and the dimension of tokens of each output that has an entry a token."""
    (device,) = {param.device for param in module.parameters()}
    with torch.no_grad():
        one, two = (module(torch.ones(1, length, dtype=torch.long, device=device)) for length in (1, 2))
    found = {}
    for name in one.keys():  # noqa: SIM118  # outputs iterate as tuples do
        if isinstance(one[name], Tensor):
            for index, (size, other) in enumerate(zip(one[name].shape, two[name].shape, strict=True)):
                if size != other:
                    found[name] = index
    return type(one), found
