"""The `memory_limit` of a pipeline: the memory of a step besides the graphs of stages, and the plans of the graphs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from dsgraph.compiler.options import parse_options
from dsgraph.compiler.request import CompileOutcome
from dsgraph.partitioning.rows import own_part
from dsgraph.passes.analysis.budget import StageNeeds
from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.analysis.states import OPTIMIZER_STATES
from dsgraph.passes.compat import storage_id
from dsgraph.passes.memory.fit import PLANNED, MemoryLimitError
from dsgraph.passes.parallel.slice_walk import slice_communication
from dsgraph.ranks.agreement import Agreement
from dsgraph.utils.byte_counts import on_device
from dsgraph.utils.errors import OptionError, StrictError

from .deferred_weights import deferred_bytes
from .pipeline_report import PipelineReport, StageMemory
from .schedule_order import HOLDS_SENT, most_in_flight
from .stage_modules import LossOf, StageModule, stage_buffers
from .stage_runs import StageRun
from .step_arguments import StepInputs
from .tied_gradients import StepGradients

_UNPROMISED = "memory_limit cannot be promised for a step of the pipeline: "
_Result = TypeVar("_Result")


@dataclass(kw_only=True)
class StageLimits:
    """The memory limit of this rank's stages, whose graphs are planned and compiled before the first step.

    Attributes:
        limit: Bytes that a step may use on this rank.
        is_strict: True if what cannot be promised is an error.
        modules: This rank's stages.
        in_flight: The most micro-batches in flight, by stage.
        deferred: Bytes of weight gradients that a zero-bubble schedule computes later.
        holds_sent: True if the schedule holds what it sends until the end of a step.
        microbatches: Number of micro-batches of a step.
        gradients: The gradients of the stages.
        equal: The group of the tensor-parallel ranks, which run equal graphs with collectives; "" for none.
        agreements: The ranks of the pipeline, then the other ranks that train the model.
    """

    limit: int
    is_strict: bool
    modules: Mapping[int, StageModule]
    in_flight: Mapping[int, int]
    deferred: int
    holds_sent: bool
    microbatches: int
    gradients: StepGradients
    equal: str
    agreements: Sequence[Agreement]
    _plans: dict[str, tuple[StageMemory, ...]] = field(default_factory=dict)
    _earlier: int = 0  # bytes of gradients that the plans count
    _told: set[str] = field(default_factory=set)

    @staticmethod
    def of(
        options: Mapping[str, Any] | None,
        modules: Mapping[int, StageModule],
        *,
        report: PipelineReport,
        gradients: StepGradients,
        loss: LossOf,
    ) -> StageLimits | None:
        """Return the limit that the options of the backend contain; None if there is none.

        Args:
            options: See `pipeline`.
            modules: This rank's stages.
            report: The schedule.
            gradients: The gradients of the stages.
            loss: The loss of a micro-batch.

        Raises:
            OptionError: The model does not return its loss.
        """
        chosen = parse_options(options) if options is not None else None
        if chosen is None or chosen.memory_limit is None:
            return None
        _check(loss)
        kind, actions = gradients.device.type, report.actions[gradients.pipeline.rank()]
        equal = next((held.group for held in gradients.slices.values()), "")
        groups = [group.group_name for group in (gradients.pipeline, gradients.copies) if group is not None]
        return StageLimits(
            limit=on_device(chosen.memory_limit, kind),
            is_strict=chosen.strict,
            modules=modules,
            in_flight=most_in_flight(actions),
            deferred=deferred_bytes({number: module.deferred for number, module in modules.items()}, actions),
            holds_sent=report.schedule in HOLDS_SENT,
            microbatches=report.microbatches,
            gradients=gradients,
            equal=equal,
            agreements=[Agreement.of(group, kind) for group in (*groups, equal) if group],
        )

    def keep(self, kind: str, run: StageRun, inputs: StepInputs) -> tuple[StageMemory, ...]:
        """Return the plans of the stages. They are made, and the stages compiled, before the first step of a kind.

        All ranks call it together.

        Args:
            kind: What the graphs of the stages depend on.
            run: The stages as the schedule runs them.
            inputs: The tensors of the step.

        Raises:
            MemoryLimitError: A stage of any rank cannot keep the limit. All ranks raise it.
            StrictError: With `strict`, a stage of any rank is not planned, or gradients of an earlier step exceed the
                memory that the limit leaves. All ranks raise it.
        """
        if kind not in self._plans:
            self._plans[kind] = self._planned_together(run, inputs)
        elif self.is_strict:
            self._together(lambda: self._check_earlier(self._plans[kind]))
        else:
            self._check_earlier(self._plans[kind])
        return self._plans[kind]

    def _check_earlier(self, plans: Sequence[StageMemory]) -> None:
        spare = self.limit - max(memory.peak or self.limit for memory in plans)
        held = self.gradients.earlier_bytes()
        if held > spare + self._earlier:
            self._tell(
                f"{held:,} bytes of gradients are held from an earlier step: call zero_grad() after each step, or "
                "use a larger limit"
            )

    def _planned_together(self, run: StageRun, inputs: StepInputs) -> tuple[StageMemory, ...]:
        self._earlier = self.gradients.earlier_bytes()
        with self.gradients.evaluating():  # with full parameters
            return self._together(lambda: self._planned(run, inputs, least=self._check_ends(run, inputs)))

    def _together(self, check: Callable[[], _Result]) -> _Result:
        """Return the result of a check; if it fails on any rank, raise the error of the first such rank on all."""
        refusal, found = "", None
        try:
            found = check()
        except (MemoryLimitError, StrictError) as error:
            refusal = str(error)
        for agreement in self.agreements:
            said = agreement.exchange("whether their stages keep the memory limit", refusal)
            refusal = next((said[rank] for rank in sorted(said) if said[rank]), "")
        if refusal:
            raise StrictError(refusal) if refusal.startswith(_UNPROMISED) else MemoryLimitError(refusal)
        return cast(_Result, found)

    def _tell(self, gap: str) -> None:
        message = f"{_UNPROMISED}{gap}"
        if self.is_strict:
            raise StrictError(message)
        if gap not in self._told:
            self._told.add(gap)
            warnings.warn(message, stacklevel=5)

    def _planned(self, run: StageRun, inputs: StepInputs, *, least: int) -> tuple[StageMemory, ...]:
        """Plan the stages one after the other: each gets its share of what the limit leaves besides earlier ones.

        Args:
            run: The stages as the schedule runs them.
            inputs: The tensors of the step.
            least: Bytes at the beginning or the end of a step.
        """
        step = self._step(run, inputs) | {"deferred gradients of weights": self.deferred}
        fixed, taken, plans = sum(step.values()), 0, dict[int, tuple[str, ...]]()
        weights = {key: (self.in_flight[key] + 1) * _activations(module) for key, module in self.modules.items()}
        is_known = True
        for number in self.modules:
            share = weights[number] / sum(weight for key, weight in weights.items() if key not in plans)
            room = max(0, self.limit - fixed - taken)
            others = taken + room - math.ceil(share * room)
            held = {**self._beside(step, number, run, inputs), "other stages": others}
            try:
                outcome = self._compiled(number, held, run, inputs)
            except MemoryLimitError as error:
                least = fixed + taken + math.ceil((error.least - fixed - others) / share)
                raise MemoryLimitError(self._refusal(number, least, error)) from error
            is_known = is_known and outcome.step_peak is not None
            taken += math.ceil(share * room) if outcome.step_peak is None else outcome.step_peak - fixed - others
            plans[number] = next((record.done[1:] for record in outcome.passes if record.name == PLANNED), ())
        peak = max(fixed + taken, least) if is_known else None
        return tuple(
            StageMemory(number, self.in_flight[number], self.limit, peak, plan) for number, plan in plans.items()
        )

    def _compiled(self, number: int, held: Mapping[str, int], run: StageRun, inputs: StepInputs) -> CompileOutcome:
        module = self.modules[number]
        module.graph_module.needs = StageNeeds(held, self.in_flight[number], self.equal)
        received = stage_buffers(run.received[number], self.gradients.device)
        outcome = module.compile_ahead(received, inputs.parts()[0])
        if outcome.step_peak is None and not outcome.from_cache:
            self._tell(f"nothing in stage {number} is trained, so that its graph is not planned")
        return outcome

    def _refusal(self, number: int, least: int, error: MemoryLimitError) -> str:
        stages = ", ".join(map(str, self.modules))
        return (
            f"pipeline: stage {number} on rank {dist.get_rank()}, with {self.in_flight[number]} micro-batches in "
            f"flight, cannot keep the limit: {error}, or more pipeline stages. With its stages {stages} the rank takes "
            f"{least:,} bytes at least"
        )

    def _beside(self, step: Mapping[str, int], number: int, run: StageRun, inputs: StepInputs) -> dict[str, int]:
        """Return the bytes of a step besides the graph of a stage, by purpose.

        The graph counts its own inputs. It frees the gradients that it receives, but their buffers stay.
        """
        module, tensors = self.modules[number], inputs.all()
        return {
            **step,
            "parameters": step["parameters"] - sum(_storages(_tensors(module, is_read=True)).values()),
            "communication": step["communication"] - _bytes(run.received[number]),
            "batch": step["batch"] - sum(tensors[root].nbytes for root in module.roots),
        }

    def _step(self, run: StageRun, inputs: StepInputs) -> dict[str, int]:
        """Return the bytes of a step on this rank that do not depend on plans, by purpose."""
        gradients = self.gradients
        trained = [own_part(param).nbytes for param in gradients.updated() if param.requires_grad]
        tensors = [*gradients.tensors(), *(tensor for module in self.modules.values() for tensor in _tensors(module))]
        return {
            "parameters": sum(_storages(tensors).values()),
            "optimizer state": OPTIMIZER_STATES * sum(trained),
            "gradients": gradients.accumulated_bytes() + self._earlier,
            "communication": sum(self._buffers(number, run) for number in self.modules),
            "batch": sum(value.nbytes for value in inputs.all().values()),
        }

    def _buffers(self, number: int, run: StageRun) -> int:
        """Return the bytes of a stage's messages: torch has a buffer for each micro-batch, and one as the example."""
        count, received, sent = self.microbatches, run.received[number], run.sent[number]
        held = (count + 1) * (_bytes(received) + _bytes(sent, gradients=True))
        held += (count if self.holds_sent else 1) * _bytes(received, gradients=True)
        # A thread of gloo may free the input of a sum of slices after the graph has read the result.
        sums = slice_communication(self.modules[number].graph_module)
        held += max((number_of(node, tensor_bytes(node.meta.get("val"))) for node in sums), default=0)
        return held + self.holds_sent * (count - self.in_flight[number]) * _bytes(sent)

    def _check_ends(self, run: StageRun, inputs: StepInputs) -> int:
        """Return the bytes at the beginning or the end of a step, whichever takes more; refuse a limit below."""
        moments = self.gradients.at_ends(self._step(run, inputs), earlier=self._earlier)
        when, held = max(moments.items(), key=lambda each: sum(each[1].values()))
        if (least := sum(held.values())) > self.limit:
            parts = ", ".join(f"{name} {size:,}" for name, size in held.items() if size)
            raise MemoryLimitError(
                f"pipeline: memory_limit is {self.limit:,} bytes, and the {when} of a step takes {least:,} at least on "
                f"rank {dist.get_rank()}: there are {parts}; raise the limit, or use more pipeline stages, smaller or "
                "fewer micro-batches, or a higher zero_stage"
            )
        return least


def _check(loss: LossOf) -> None:
    """Raise an error for a step whose memory cannot be limited."""
    if loss.is_missing:
        raise OptionError(
            "pipeline: the option 'memory_limit' bounds a step, and the model returns no loss, so that it cannot "
            "step: leave the option out"
        )
    if loss.is_function:
        raise OptionError(
            "pipeline: the option 'memory_limit' is not supported with loss_fn, which runs uncompiled, and its "
            "memory is not planned: let the model return its loss"
        )


def _tensors(module: StageModule, *, is_read: bool = False) -> list[Tensor]:
    """Return the parameters and buffers of a stage; with `is_read` those that its graph reads, and not a copy of."""
    copied = {id(buffer) for buffer in module.written if is_read}
    buffers = [buffer for buffer in module.graph_module.buffers() if id(buffer) not in copied]
    return [*module.graph_module.parameters(), *buffers]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def _bytes(values: Sequence[Tensor], *, gradients: bool = False) -> int:
    return sum(value.numel() * value.element_size() for value in values if value.requires_grad or not gradients)


def _activations(module: StageModule) -> int:
    """Return the bytes of all values that a stage computes: an estimate of its share of a rank's memory."""
    nodes = [node for node in module.graph_module.graph.nodes if node.op.startswith("call")]
    return 1 + sum(number_of(node, tensor_bytes(node.meta.get("val"))) for node in nodes)
