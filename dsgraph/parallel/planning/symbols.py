"""The symbols of the formulas of a layout, and their meaning."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

# Symbols of the model.
params, layers, hidden, seq, vocab, heads = sympy.symbols("params layers hidden seq vocab heads", positive=True)
# Symbols of the layout and the training.
tp, pp, dp, gpus, batch, micro_batch = sympy.symbols("tp pp dp gpus batch micro_batch", positive=True)
zero_stage, recomputes = sympy.symbols("zero_stage recomputes", nonnegative=True)
# Symbols of the GPU.
memory, peak, share_of_peak = sympy.symbols("memory peak share_of_peak", positive=True)
tp_bytes_per_s, pp_bytes_per_s, dp_bytes_per_s = sympy.symbols(
    "tp_bytes_per_s pp_bytes_per_s dp_bytes_per_s", positive=True
)
# Symbols of a stage, whose parts have a formula each.
stage_layers, stage_params = sympy.symbols("stage_layers stage_params", positive=True)

ZERO_PAPER = "ZeRO, arXiv 1910.02054"
MEGATRON = "Megatron-LM on GPU clusters, arXiv 2104.04473"
RECOMPUTATION = "Reducing activation recomputation, arXiv 2205.05198"
BLOG = "DeepSpeed: extreme-scale model training for everyone, Microsoft Research blog, September 2020"
COUNTING = "by counting"


@dataclass(frozen=True)
class Formula:
    """One quantity.

    Attributes:
        name: Its symbol, for later formulas.
        value: The expression; symbols are inputs, or names of earlier formulas.
        unit: "bytes", "seconds", "FLOPs" or "".
        what: Its description.
        source: Its publication, or "by counting".
    """

    name: str
    value: sympy.Expr
    unit: str
    what: str
    source: str

    @property
    def symbol(self) -> sympy.Symbol:
        """The symbol that later formulas use."""
        return sympy.Symbol(self.name, nonnegative=True)
