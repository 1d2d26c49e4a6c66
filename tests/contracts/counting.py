"""The base of dispatch modes that count ops of eager code."""

from __future__ import annotations

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):
    """Counts something by name.

    Attributes:
        count: Name -> number of times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo run what it has compiled: under another mode it runs the model uncompiled."""
        return True
