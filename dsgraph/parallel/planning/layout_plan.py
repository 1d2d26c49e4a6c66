"""The cost of a layout: the formulas with numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache

from sympy import Eq, Piecewise, Symbol, lambdify
from sympy.printing.str import StrPrinter

from dsgraph.utils.errors import LayoutError

from . import memory_formulas, time_formulas
from .gpus import NodeGpu
from .layout import ModelShape, RankLayout, TrainingSetup, refusal
from .symbols import Formula

# Large matrix products reach 0.7 (`passes/analysis/hardware.py`); the rest of a layer takes its part. With 0.6 the
# speed of 1 T parameters on 3,072 A100 is within 10 % of that in arXiv 2104.04473.
SHARE_OF_PEAK = 0.6
SHARE_OF_LINK = 0.8
SHARE_OF_MEMORY = 0.92

ASSUMPTIONS = (
    "mixed precision with Adam: 16 bytes a parameter; ZeRO splits 12 (stage 1), 14 (2) or 16 (3) of them over dp ranks",
    "even split: layers / pp layers and 1 / pp of all parameters on each stage, as publications count them",
    "first stage: the most layers of any stage, and the embeddings; last stage: the fewest layers, head and loss",
    "1F1B: the first stage stores the activations of pp micro-batches, the last stage those of one",
    "buffers: one recomputed layer, with its attention scores (no fused attention); publications often omit it",
    "a layer saves its input, 2 bytes a number, or without checkpointing all activations; tp ranks save a slice each",
    "ZeRO stage 2 reduces gradients in each micro-batch, stage 3 also gathers parameters twice; 0 and 1 once a step",
    f"computation reaches {SHARE_OF_PEAK:.0%} of the peak, links {SHARE_OF_LINK:.0%} of their rate; nothing overlaps",
    "an axis across nodes sends all its bytes over the node's network adapters, which the GPUs share equally",
    f"{1 - SHARE_OF_MEMORY:.0%} of the memory is reserved for the driver, the allocator and communication",
    "the time of the optimizer, of checkpoints and of data loading is not included",
)

_STAGES = (
    ("divided evenly", memory_formulas.EVEN),
    ("first stage", memory_formulas.FIRST),
    ("last stage", memory_formulas.LAST),
)
_WORDS = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
_OF_A_LINK = ("bytes", "bytes_per_s", "time")


@dataclass(frozen=True)
class AxisTraffic:
    """The traffic of one axis of a layout.

    Attributes:
        axis: "tensor", "pipeline" or "data".
        ranks: Number of ranks of a group.
        inside: True if a group is inside one node.
        sent: Bytes that a GPU sends in a step.
        bytes_per_s: Bytes per second of the link.
        seconds: Time of the traffic.
    """

    axis: str
    ranks: int
    inside: bool
    sent: float
    bytes_per_s: float
    seconds: float


@dataclass(frozen=True)
class FormulaValues:
    """A formula with its numbers.

    Attributes:
        formula: The formula.
        given: The value of each of its symbols.
        value: Its result.
    """

    formula: Formula
    given: Mapping[str, float]
    value: float

    @property
    def with_values(self) -> str:
        """The formula with numbers in place of its symbols."""
        return _Printer(self.given).doprint(self.formula.value)

    @property
    def symbolic(self) -> str:
        """The formula with its symbols."""
        return _Printer().doprint(self.formula.value)


@dataclass(frozen=True)
class LayoutPlan:
    """A layout and its cost.

    Attributes:
        layout: The layout.
        even: Bytes of a GPU by part, if stages could be divided evenly, as publications assume.
        first: Bytes of a GPU of the first stage, by part.
        last: Bytes of a GPU of the last stage, by part.
        values: Every other quantity, by its formula's name.
        links: The traffic of each axis.
        usable: Bytes of a GPU's memory that the model may use.
        steps: The computation of all values.
    """

    layout: RankLayout
    even: Mapping[str, float]
    first: Mapping[str, float]
    last: Mapping[str, float]
    values: Mapping[str, float]
    links: tuple[AxisTraffic, ...]
    usable: float
    steps: tuple[tuple[str, FormulaValues], ...]

    @property
    def fits(self) -> bool:
        """True if the memory suffices on the fullest GPU."""
        return self.fullest <= self.usable

    @property
    def fullest(self) -> float:
        """Bytes of the fullest GPU."""
        return max(self.first["total"], self.last["total"])


def plan(model: ModelShape, layout: RankLayout, training: TrainingSetup, *, gpu: NodeGpu, gpus: int) -> LayoutPlan:
    """Compute the cost of a layout.

    Raises:
        LayoutError: The layout is impossible, for other reasons than memory; see `LayoutPlan.fits` for that.
    """
    reason = refusal(layout, model, training, gpu=gpu, gpus=gpus)
    if reason is not None:
        raise LayoutError(reason)
    inside = _inside(layout, gpu)
    rate = {axis: gpu.inside_bytes_per_s if near else gpu.across_bytes_per_s for axis, near in inside.items()}
    numbers: dict[str, float] = {
        **asdict(model),
        **asdict(layout),
        **{name: int(value) for name, value in asdict(training).items() if name != "checkpointing"},
        **{f"{axis}_bytes_per_s": SHARE_OF_LINK * value for axis, value in rate.items()},
        "gpus": gpus,
        "recomputes": int(training.checkpointing),
        "peak": gpu.peak_flops,
        "share_of_peak": SHARE_OF_PEAK,
    }
    steps = [("a step", item) for item in _evaluate(memory_formulas.OF_A_STEP, numbers)]
    holds: list[dict[str, float]] = []
    for heading, stage in _STAGES:
        own = dict(numbers)
        steps += [(heading, item) for item in _evaluate((*stage, *memory_formulas.OF_A_STAGE), own)]
        holds.append({formula.name: own[formula.name] for formula in memory_formulas.OF_A_STAGE})
    even, first, last = holds
    steps += [("time", item) for item in _evaluate(time_formulas.TIMES, numbers)]
    links = tuple(
        AxisTraffic(_WORDS[axis], getattr(layout, axis), near, *(numbers[f"{axis}_{what}"] for what in _OF_A_LINK))
        for axis, near in inside.items()
    )
    usable = SHARE_OF_MEMORY * gpu.memory_bytes
    return LayoutPlan(layout, even, first, last, numbers, links, usable, tuple(steps))


def efficiency(stages: int, micro_batches: int) -> float:
    """Return the share of the time in which a pipeline stage computes, by the formula of the plan."""
    return _function(time_formulas.EFFICIENCY)(micro_batches=micro_batches, pp=stages)


def _inside(layout: RankLayout, gpu: NodeGpu) -> dict[str, bool]:
    """Return which axes stay in a node: tensor-parallel ranks are next to each other, then data-parallel ones."""
    near = {"tp": layout.tp, "dp": layout.tp * layout.dp, "pp": layout.gpus}
    return {axis: near[axis] <= gpu.per_node for axis in ("tp", "pp", "dp")}


def _evaluate(formulas: Iterable[Formula], numbers: dict[str, float]) -> Iterator[FormulaValues]:
    """Yield the value of each formula, and add it to the numbers of the next ones."""
    for formula in formulas:
        given = {symbol.name: numbers[symbol.name] for symbol in formula.value.free_symbols}
        value = numbers[formula.name] = float(_function(formula)(**given))
        yield FormulaValues(formula, given, value)


@cache
def _function(formula: Formula):  # type: ignore[no-untyped-def]
    names = sorted(formula.value.free_symbols, key=lambda symbol: symbol.name)
    return lambdify(names, formula.value, "math")


class _Printer(StrPrinter):
    """Prints cases as Python does, and optionally numbers in place of symbols: sympy would multiply them out."""

    def __init__(self, given: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self._given = given

    def _print_Symbol(self, symbol: Symbol) -> str:  # noqa: N802
        return symbol.name if self._given is None else f"{self._given[symbol.name]:.10g}"

    def _print_Piecewise(self, cases: Piecewise) -> str:  # noqa: N802
        (*special, (last, _)) = cases.args
        before = "".join(f"{self._print(value)} if {self._print(when)} else " for value, when in special)
        return f"({before}{self._print(last)})"

    def _print_Equality(self, relation: Eq) -> str:  # noqa: N802
        return f"{self._print(relation.lhs)} == {self._print(relation.rhs)}"
