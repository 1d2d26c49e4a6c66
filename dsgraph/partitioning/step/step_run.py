"""The steps of a model: the first of a kind is recorded, later ones run the program of its step graph.

A step is predicted: a forward follows the plan that followed the previous step's plan the last time. If a unit is
called that the plan does not expect, the rest of the plan is run, so that ranks which follow it do not wait; then each
unit gathers its parameters by itself and reduces its gradients at once, and the step is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsgraph.compat.autograd import at_end_of_backward, compiled_backwards, running_backward
from dsgraph.compat.dtensor import distributed_like
from dsgraph.compat.tensors import unseen_by_modes
from dsgraph.partitioning.blocks.block import Block, BlockLimit
from dsgraph.partitioning.eager.replaced_data import refuse_replaced_data
from dsgraph.partitioning.gathered_copies import gather_now, named
from dsgraph.partitioning.parameter import ParameterState, Version
from dsgraph.ranks.model_operations import ModelOperations

from .full_parameters import SavedParameters, differentiable
from .reductions import add_gradient, start_reductions
from .step_plan import Forward, StepPlans
from .step_program import Run
from .step_record import UNCOMPILED, Entries, Key, StepRecord, StepUnit

_NONE = -1


@dataclass(eq=False)
class StepRun:
    """The steps of one model.

    Attributes:
        operations: The model's operations, which ranks compare.
        parameters: The model's parameters.
        note_gradient: Called where gradients of parameters with gathered copies are computed.
        plans: The plans.
        blocks: The model's repeated blocks.
        limit: The state of a `memory_limit`. Memory that it leaves holds full parameters for the backward.
        compiled_with: The options of the compiled graphs that are units; None without such graphs.
        gathers_ahead: False if the graphs were compiled with `overlap_comm=False`.
        in_step: True while further micro-batches of a step follow, for which a limit leaves memory.
        left: Reasons for which plans were left, the last ones.
        gathered_alone: Number of parameters that were gathered outside a plan.
    """

    operations: ModelOperations
    parameters: list[ParameterState] = field(default_factory=list)
    note_gradient: Callable[[], None] = field(default=lambda: None, repr=False)
    plans: StepPlans = field(default_factory=StepPlans)
    blocks: list[Block] = field(default_factory=list)
    limit: BlockLimit = field(default_factory=BlockLimit)
    compiled_with: Any = None
    gathers_ahead: bool = True
    in_step: bool = False
    left: list[str] = field(default_factory=list)
    gathered_alone: int = 0
    _forward: Forward = field(default_factory=Forward)
    _backward: Run | None = None
    _of: Forward | None = None
    _task: int = _NONE
    _ends: Callable[[], Callable[[], None] | None] = lambda: None
    _present: dict[ParameterState, Tensor] = field(default_factory=dict)
    _given: set[ParameterState] = field(default_factory=set)
    _held: dict[ParameterState, tuple[Tensor, Version]] = field(default_factory=dict)
    _beside: dict[ParameterState, tuple[Tensor, Version]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weak = weakref.WeakMethod(self.settle)  # shards refer to their operations, and must not keep the model

        def settle() -> None:
            if (living := weak()) is not None:
                living()

        self.operations.settle = settle

    @unseen_by_modes
    def run_unit(
        self, unit: StepUnit, numbers: Sequence[int], compiled: Callable[..., Any], args: Sequence[Any]
    ) -> Any:
        """Call a compiled graph with full parameters in place of the inputs with these numbers."""
        entries: Entries = tuple(args[number].dsgraph_entry for number in numbers)
        for entry in entries:
            refuse_replaced_data(entry.param, entry.name)
        recomputes = running_backward() != _NONE
        if recomputes:
            forward, number, full = self._of or self._forward, _NONE, self._full(entries)
        else:
            others = [value for place, value in enumerate(args) if place not in numbers]
            forward, number = self._enter(unit, entries, others)
            full = forward.run.enter() if forward.run is not None else self._full(entries)
        given, before = list(args), set(compiled_backwards(args))  # a unit may return a view of its input
        for place, tensor in zip(numbers, self._differentiable(forward, number, entries, full), strict=True):
            given[place] = tensor
        addresses = (tensor.untyped_storage().data_ptr() for tensor in full)
        shared = {at: entry for at, entry in zip(addresses, entries, strict=True) if entry.spec.group}
        saved = SavedParameters(shared, self._full_in_backward)
        try:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                outputs = compiled(*given)
        except BaseException:
            if not recomputes:
                forward.fail()
            raise
        del given, full
        if not recomputes:
            self._end_call(forward, number, outputs, saved.bytes)
        for node in set(compiled_backwards(outputs)) - before:
            node.register_prehook(partial(self._before_backward, forward, number, entries))
            node.register_hook(partial(self._after_backward, forward, number))
        return outputs

    @unseen_by_modes
    def read(self, entry: ParameterState, beside: Entries) -> Tensor | None:
        """Return a full parameter for uncompiled code in a forward; None in a recomputation.

        Args:
            entry: The parameter.
            beside: Replicated parameters that the same code will probably read next: they become parts of one unit.
        """
        if running_backward() != _NONE:
            return None
        known, version = self._beside.pop(entry, (None, None))
        if known is not None and version == entry.version:
            return known
        entries = (entry, *beside)
        forward, number = self._enter(UNCOMPILED, entries, ())
        if number != _NONE:
            forward.reads.add(number)
        full = forward.run.enter() if forward.run is not None else self._full(entries)
        given = self._differentiable(forward, number, entries, full)
        self._end_call(forward, number, (), 0)
        if not torch.is_inference_mode_enabled():
            self._beside = {each: (tensor, each.version) for each, tensor in zip(beside, given[1:], strict=True)}
        return given[0]

    def hand_out(self, entry: ParameterState, full: Tensor, *, is_kept: bool) -> Tensor:
        """Return a full parameter outside plans, whose gradient is reduced where it is computed.

        Args:
            entry: The parameter.
            full: Its value.
            is_kept: True if several backwards may go through it, and it may be written to, by its `Source`.
        """
        if not torch.is_grad_enabled() or not entry.param.requires_grad:
            return full.detach() if is_kept else full.view_as(full)
        reduce = partial(self._reduce, Forward(), _NONE)
        (given,) = differentiable((entry,), (full,), reduce, is_uncompiled=not is_kept)
        return given

    def settle(self) -> None:
        """Run the rest of a plan, because this rank continues with something else."""
        if running_backward() != _NONE:
            return
        self._finish_backward()
        if self._forward.run is not None:
            self._leave_forward(self._forward, "the forward did not end")

    def ran(self) -> list[Block]:
        """Return the blocks whose graphs ran in the last step, in their order."""
        record = self._forward.record or self.plans.recorded
        of = {entry: block for block in self.blocks for entry in (*block.entries, *block.replicated)}
        read = (entry for call in record.calls if call.unit.block for entry in call.entries)
        return list(dict.fromkeys(of[entry] for entry in read if entry in of))

    def staying(self) -> list[Block]:
        """Return the blocks whose full parameters stay from the forward to the backward, in their order."""
        ran, kept = self.ran(), {entry for plan in self.plans for entry in plan.kept.values()}
        return [block for block in ran if kept.issuperset(block.entries)] or ran[-1:]

    def holds(self) -> set[ParameterState]:
        """Return the parameters that are gathered once for all micro-batches of a step, where memory is left."""
        return set().union(*(plan.holds for plan in self.plans)) if self.limit.spare else set()

    def note_spare(self, spare: int) -> None:
        """Note the bytes of a limit that a step leaves on all ranks; plans for another amount are dropped."""
        known, self.limit.spare = self.limit.spare, spare if self.limit.spare is None else min(self.limit.spare, spare)
        if self.limit.spare != known:
            self.drop()

    def release_held(self) -> None:
        """Release what was held for micro-batches that do not follow."""
        self._held = {}

    def clear(self) -> None:
        """Remove all blocks, which are about to be defined again."""
        self.blocks = []
        self._forward = Forward()
        self.drop()

    def drop(self) -> None:
        """Drop the plans, which were made for other blocks, options, limits, dtypes or devices."""
        self.settle()
        self.plans.drop()
        self._held, self._forward.realised, self.limit.staying = {}, None, 0

    def _enter(self, unit: StepUnit, entries: Entries, inputs: Sequence[Any]) -> tuple[Forward, int]:
        """Return the forward that a call belongs to, and the call's number in it; -1 if nothing is recorded."""
        self._beside = {}
        if any(version != entry.version for entry, (_, version) in self._held.items()):
            self._held = {}
        key: Key = (tuple(map(id, entries)), torch.is_grad_enabled(), any(entry in self._held for entry in entries))
        if self._task != _NONE:  # the backward raised an error
            self.settle()
        now = self._forward
        if now.run is not None:
            if now.expects(key):
                now.number += 1
                return now, now.number - 1
            self._leave_forward(now, f"call {now.number} was not {unit.name}")
        if now.goes_on(key) and now.plan is not None:
            now.follows, now.kept, now.realised = False, {}, None
            now.record = now.plan.record.beginning(now.number)
        if now.is_over or now.record is None or _begins_again(now.record, key):
            now = self._begin(key)
            if now.run is not None:
                now.number = 1
                return now, 0
        if now.record is None:
            return now, _NONE
        return now, now.record.begin(unit, key, entries, inputs)

    def _begin(self, key: Key) -> Forward:
        """Begin a forward, with the plan that followed the last one, if it begins with this call."""
        self._note(self._forward)
        if self._forward.realised is not None:
            self.plans.note(self._forward.realised)
        known = {entry: entry.gathered_copy for entry in self.parameters if entry.gathered_copy is not None}
        known |= {entry: full for entry, (full, _) in self._held.items()}
        plan = self.plans.choose(key, known)
        if plan is None:
            self._forward = Forward(record=StepRecord(held=frozenset(known), kind=self.plans.kind))
        else:
            copies = {name: known[entry] for name, entry in plan.copies.items()}
            first = plan.record.calls[0].entries[0].name
            with self.operations.gathering(f"the parameters of plan {plan.number}, {first!r} first", outside=False):
                run = plan.run(plan.forward, self._deliver, copies)
            self._forward = Forward(plan, run, follows=True, realised=plan, kept=copies)
        return self._forward

    def _end_call(self, forward: Forward, number: int, outputs: Any, saved_bytes: int) -> None:
        """Go on in the forward after a call."""
        if forward.run is not None:
            forward.run.leave()
            if forward.run.next_call == _NONE:
                forward.kept, forward.run = {**forward.kept, **forward.run.kept}, None
        if forward.record is not None and number != _NONE:
            forward.record.end(number, outputs, saved_bytes)

    def _leave_forward(self, forward: Forward, why: str) -> None:
        """Leave the plan of a forward: run it out, and record the step."""
        run, plan = forward.run, forward.plan
        assert run is not None and plan is not None
        self.left = [*self.left[-7:], why]
        forward.run, forward.follows, forward.kept, forward.realised = None, False, {}, None
        forward.record = None if forward.has_failed else plan.record.beginning(forward.number)
        run.run_out({})

    def _differentiable(
        self, forward: Forward, number: int, entries: Entries, full: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        reduce = partial(self._reduce, forward, number)
        found = differentiable(entries, full, reduce, is_uncompiled=number in forward.reads)
        graph = next((tensor.grad_fn for tensor in found if tensor.grad_fn is not None), None)
        if graph is not None and torch.is_grad_enabled():
            forward.note_trained(graph)
        return found

    @unseen_by_modes
    def _before_backward(self, forward: Forward, number: int, entries: Entries, *_: Any) -> None:
        run = self._entered(forward, number)
        if run is not None and run.next_call != number:
            self._leave_backward(f"the backward of call {number} came before that of call {run.next_call}")
            run = None
        if forward.record is not None and number != _NONE:
            forward.record.backward.append(number)
        full = run.enter() if run is not None else self._full(entries)
        self._present = dict(zip(entries, full, strict=False))

    @unseen_by_modes
    def _after_backward(self, forward: Forward, number: int, *_: Any) -> None:
        self._present = {}
        run = self._entered(forward, number)
        if run is not None and run.next_call == number and not run.program.gradients[number]:
            run.leave()

    @unseen_by_modes
    def _reduce(
        self, forward: Forward, number: int, entries: Entries, grads: list[Any], adds: Sequence[bool]
    ) -> list[Tensor | None]:
        """Reduce gradients, by the plan or at once.

        Args:
            forward: The forward that has read the parameters.
            number: Number of the call that has read them.
            entries: The parameters.
            grads: Their full gradients; those that the plan reduces are taken out.
            adds: For each, True if autograd would only add it to `.grad`, which is done here or later.

        Returns:
            The reduced gradients of the others.
        """
        if any(entry.gathered_copy is not None for entry in entries):
            self.note_gradient()
        if number in forward.reads:
            self._before_backward(forward, number, ())
        run = self._entered(forward, number)
        found: list[Tensor | None] = [None] * len(entries)
        own = {index: entry for index, entry in enumerate(entries) if adds[index]}
        rest = list(range(len(entries)))
        if run is not None:
            plan = forward.plan
            assert plan is not None
            is_next = run.next_call == number
            planned = plan.record.calls[number].trained if is_next else ()
            ours = {index: entry for index, entry in own.items() if entry in planned}
            given = {planned.index(entry): grads[index] for index, entry in ours.items()}
            rest = [index for index in rest if index not in ours]
            grads[:] = [grads[index] for index in rest]
            self._given.update(ours.values())
            if is_next and len(given) == len(planned) and plan.alone.issuperset({*own.values()} - {*planned}):
                run.leave([given.pop(index) for index in range(len(planned))])
            else:
                self._leave_backward(f"the backward of call {number} computed other gradients", given)
                if planned and forward.record is not None:
                    forward.record.backward.append(number)
        if forward.record is not None and number != _NONE:
            forward.record.calls[number].trained = tuple(own.values())
        if rest:
            with self.operations.reducing(named("the gradient of", [entries[index] for index in rest])):
                finishes = start_reductions([(entries[index], grad) for index, grad in zip(rest, grads, strict=True)])
            for index, finish in zip(rest, finishes, strict=True):
                if adds[index]:
                    add_gradient(entries[index].param, finish())
                else:
                    found[index] = distributed_like(entries[index].param, finish())
        return found

    def _entered(self, forward: Forward, number: int) -> Run | None:
        """Return the running plan of a forward's backward, which begins with its first call; None if none is followed.

        A recomputation is no part of a plan.
        """
        if number == _NONE:
            return None
        if self._task != running_backward():
            self._finish_backward()
            self._task, self._beside = running_backward(), {}
            self._ends = weakref.ref(end := partial(self._end_backward))  # torch keeps it as long as the backward runs
            at_end_of_backward(end)
        if self._of is forward:
            return self._backward
        if self._backward is not None and self._backward.next_call != _NONE:
            self._leave_backward("the backward of another forward began")
        self._backward = None
        self._of, forward.is_used = forward, True
        if forward.run is not None:
            self._leave_forward(forward, "the backward began early")
        plan = forward.plan
        if plan is not None and forward.follows and plan.backward is not None:
            with self.operations.reducing(f"the gradients of plan {plan.number}"):
                self._backward = plan.run(plan.backward, self._deliver, forward.kept)
            if self.in_step and not self._held:
                stay = {plan.kept[name]: value for name, value in forward.kept.items() if name in plan.kept}
                self._held = {entry: (full, entry.version) for entry, full in stay.items() if entry in plan.holds}
        forward.follows, forward.kept = False, {}  # another backward of it gathers by itself
        return self._backward

    def _leave_backward(self, why: str, given: Mapping[int, Tensor] | None = None) -> None:
        """Leave the plan of a backward: run it out, and record the step.

        Args:
            why: The reason.
            given: Number of a gradient of the running unit -> its value.
        """
        run, forward = self._backward, self._of
        assert run is not None and forward is not None and forward.plan is not None
        self._backward = None
        self.left = [*self.left[-7:], why]
        record = forward.plan.record
        forward.record, forward.realised = record.beginning(len(record.calls), run.place), None
        run.run_out(given or {})

    def _deliver(self, entry: ParameterState, value: Tensor) -> None:
        """Add a reduced gradient to `.grad`, unless it is that of zeros alone."""
        if entry in self._given:
            add_gradient(entry.param, value)

    def _end_backward(self) -> None:
        if self._backward is not None and self._backward.next_call != _NONE:
            self._leave_backward("the backward ended early")
        forward = self._of
        self._finish_backward()
        if not self.in_step:
            self.release_held()
        if forward is not None:
            self._note(forward)

    def _finish_backward(self) -> None:
        """Forget the running backward. If another one began inside it, or it raised an error, its plan is run out."""
        try:
            if self._backward is not None and self._backward.next_call != _NONE:
                if self._ends() is None:  # an error: what it has computed may have been dropped since
                    self._given.clear()
                self._leave_backward("the backward did not end")
        finally:
            self._backward, self._of, self._task, self._present, self._given = None, None, _NONE, {}, set()

    def _note(self, forward: Forward) -> None:
        """Find or make the plan of a step that has ended."""
        record, forward.record = forward.record, None
        if record is None and forward.realised is not None:
            self.plans.recorded = forward.realised.record
        if record is not None:
            forward.realised = self.plans.plan_of(record)
            self.limit.staying = sum(entry.copy_bytes for entry in self.holds())

    def _full(self, entries: Entries) -> list[Tensor]:
        """Return full parameters, outside a plan."""
        found = {**{entry: full for entry, (full, _) in self._held.items()}, **self._present}
        missing = [entry for entry in entries if entry not in found]
        self.gathered_alone += sum(bool(entry.spec.group) and entry.gathered_copy is None for entry in missing)
        found |= gather_now(missing, self.operations)
        return [found[entry] for entry in entries]

    def _full_in_backward(self, entry: ParameterState) -> Tensor:
        (self._present[entry],) = self._full((entry,))
        return self._present[entry]

    def copy(self, operations: ModelOperations) -> StepRun:
        """Return the steps of a copy of the model."""
        return StepRun(operations, self.parameters, blocks=self.blocks, limit=self.limit)


def _begins_again(record: StepRecord, key: Key) -> bool:
    """Return True for the first call of another forward. The end of a forward without gradients is not known."""
    if torch.is_grad_enabled():
        return bool(record.calls) and not any(call.key[1] for call in record.calls)
    return bool(record.calls) and record.calls[0].key == key
