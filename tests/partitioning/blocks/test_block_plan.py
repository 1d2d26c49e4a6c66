"""The order in which blocks are gathered and released, without any communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsgraph.partitioning.blocks.block_plan import BlockPlan
from dsgraph.utils.errors import PartitionError

BLOCKS = "abc"


class CompiledFunction(torch.autograd.Function):
    """A graph as AOTAutograd makes it: its node in autograd is known by this name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grad * 2, None


class _Block:
    """A block that writes down what the plan does with it."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, self.lines = name, lines
        self.copy: Any = torch.ones(1)
        entry = SimpleNamespace(name=name, block_copy=self.copy, block_read=None)
        self.copy.dsgraph_block, self.copy.dsgraph_entry = self, entry
        self.running, self.is_present, self.is_read, self.is_kept = 0, False, True, False

    def begin_call(self) -> None:
        self.running += 1

    def end_call(self) -> None:
        self.running -= 1

    def hand_out(self) -> None:
        pass

    def start(self) -> None:
        if not self.is_present:
            self.lines.append(f"gather {self.name}")
        self.is_present = True

    def wait(self) -> None:
        assert self.is_present

    def release(self) -> None:
        if self.is_present:
            self.lines.append(f"release {self.name}")
        self.is_present = self.is_kept = False

    def abandon(self) -> None:
        self.release()

    def forget(self) -> None:
        pass

    def keep_for_readers(self, outputs: Any) -> list[Any]:
        return []


class _Model:
    """Blocks in a plan, which check that their copies are there whenever they compute."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.plan = BlockPlan(operations=None)  # type: ignore[arg-type]
        self.blocks = {name: _Block(name, self.lines) for name in BLOCKS}
        self.plan.blocks += self.blocks.values()  # type: ignore[arg-type]
        self.reduces = False

    def forward(self, order: str = BLOCKS, fails_at: str = "") -> Tensor:
        x = torch.ones(2, requires_grad=True)
        for name in order:
            x = self._call(name, x, fails=name == fails_at)
        return x.sum()

    def _call(self, name: str, x: Tensor, *, fails: bool) -> Tensor:
        block: Any = self.blocks[name]

        def computes(where: str) -> None:
            assert block.is_present
            self.lines.append(f"{where} {name}")
            if self.reduces and where == "backward":
                self.plan.finish_later([self._reduction(name)])

        def graph(x: Tensor, copy: Tensor) -> list[Tensor]:
            computes("forward")
            if fails:
                raise ValueError(name)
            return [CompiledFunction.apply(x, lambda: computes("backward"))]

        self.plan.begin(block)
        try:
            (found,) = self.plan.run_graph([1], graph, [x, block.copy], waits=True)
        except ValueError:
            self.plan.end(block, failed=True)
            raise
        self.plan.end(block)
        return found

    def _reduction(self, name: str) -> Any:
        self.lines.append(f"reduce {name}")
        return SimpleNamespace(
            add=lambda: self.lines.append(f"add {name}"), finish=lambda: self.lines.append(f"drop {name}")
        )

    def said(self) -> list[str]:
        lines, self.lines[:] = list(self.lines), []
        return lines


@pytest.fixture
def model() -> Iterator[_Model]:
    made = _Model()
    yield made
    assert not any(block.is_present for block in made.blocks.values()), "all memory was released"


FIRST_STEP = [
    *("gather a", "forward a", "release a", "gather b", "forward b", "release b", "gather c", "forward c", "release c"),
    *("gather c", "gather b", "backward c", "release c", "gather a", "backward b", "release b"),
    *("backward a", "release a"),
]


def test_a_first_forward_knows_no_order_and_its_backward_does(model):
    model.forward().backward()
    assert model.said() == FIRST_STEP


def test_the_next_block_is_gathered_while_one_computes_and_the_last_stays(model):
    for _ in range(2):
        model.forward().backward()
    assert model.said()[len(FIRST_STEP) :] == [
        *("gather a", "gather b", "forward a", "release a", "gather c", "forward b", "release b", "forward c"),
        *("gather b", "backward c", "release c", "gather a", "backward b", "release b", "backward a", "release a"),
    ]


def test_without_overlap_nothing_is_gathered_before_it_runs(model):
    model.plan.gathers_ahead = False
    for _ in range(2):
        model.forward().backward()
    lines = model.said()
    starts = [number for number, line in enumerate(lines) if line.startswith("gather")]
    assert all(lines[number + 1].split()[1] == lines[number].split()[1] for number in starts)


def test_without_gradients_nothing_stays(model):
    model.forward().backward()
    model.said()
    with torch.no_grad():
        model.forward()
    assert model.said()[-1] == "release c"


def test_what_stayed_for_a_backward_that_never_came_is_gathered_again(model):
    model.forward().backward()
    model.forward()
    model.said()
    model.forward("c").backward()
    assert model.said()[:2] == ["release c", "gather c"]


def test_what_nobody_used_goes_at_the_end_of_the_backward(model):
    model.forward().backward()
    model.said()
    model.forward("ac").backward()
    assert "release b" in model.said()


def test_released_memory_is_refused_before_a_backward_reads_it(model):
    loss = model.forward()
    model.blocks["b"].copy.untyped_storage().resize_(0)  # as of a copy that a conversion of the model has replaced
    with pytest.raises(PartitionError, match=r"the backward reads parameter 'b' as it was before it was converted"):
        loss.backward()
    model.plan.clear()


def test_an_error_in_a_forward_releases_everything(model):
    model.forward().backward()
    with pytest.raises(ValueError, match="b"):
        model.forward(fails_at="b")
    assert not any(block.is_present for block in model.blocks.values())
    model.forward().backward()


def test_blocks_that_no_graph_reads_are_not_gathered_ahead(model):
    model.forward().backward()
    for block in model.blocks.values():
        block.is_read = False
    model.said()
    model.plan.begin(model.blocks["a"])
    assert model.said() == []
    model.plan.end(model.blocks["a"])


def test_a_forward_that_ended_after_its_first_block_is_another_one(model):
    model.forward().backward()
    before = model.plan.forwards
    with torch.no_grad():
        model.forward("a")
        model.forward("a")
        model.forward()
    assert model.plan.forwards == before + 2


def _about_gradients(lines: list[str]) -> list[str]:
    return [line for line in lines if line.split()[0] in ("backward", "reduce", "add", "drop")]


def test_gradients_are_reduced_while_the_next_block_computes(model):
    model.reduces = True
    model.forward().backward()
    assert _about_gradients(model.said()) == [
        *("backward c", "reduce c", "backward b", "reduce b", "add c", "backward a", "reduce a", "add b", "add a"),
    ]


def test_reductions_of_a_backward_that_failed_are_dropped(model):
    model.reduces = True
    loss = model.forward()
    model.blocks["a"].copy.untyped_storage().resize_(0)
    with pytest.raises(PartitionError):
        loss.backward()
    model.said()
    model.blocks["a"].copy.untyped_storage().resize_(4)
    model.forward().backward()
    lines = _about_gradients(model.said())
    assert lines[0] == "drop b" and lines.count("add b") == 1


def test_without_overlap_gradients_are_waited_for_at_once(model):
    model.reduces, model.plan.gathers_ahead = True, False
    model.forward().backward()
    assert _about_gradients(model.said()) == [
        *("backward c", "reduce c", "add c", "backward b", "reduce b", "add b", "backward a", "reduce a", "add a"),
    ]
