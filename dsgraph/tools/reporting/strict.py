"""The errors of `strict=True`: things that were not done as the model or its options ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsgraph.compat.compiled import recompile_limit
from dsgraph.compiler.frames import Capture, remedy
from dsgraph.compiler.options import BackendOptions
from dsgraph.compiler.request import CompileRequest
from dsgraph.partitioning.blocks.block_frames import ITS_OWN_FRAME
from dsgraph.passes import AxisRole
from dsgraph.passes.kernels.findings import NOWHERE
from dsgraph.passes.kernels.sparsify_attention import SparsifyAttention
from dsgraph.utils.errors import StrictError

from .activity import in_words
from .compile_log import CompileEntry, CompileLog, GivenUp
from .measure import is_own_op

_WITHOUT = "or compile without strict=True; dsgraph.report(model) lists all of them then"


def refuse_given_up(given_up: Iterable[GivenUp], capture: Capture) -> None:
    """Refuse to continue if Dynamo has given up on a function that called this one or was called by it.

    Raises:
        StrictError: Names the function, the place and torch's reason.
    """
    for frame in given_up:
        if ITS_OWN_FRAME not in frame.reason and frame.concerns(capture.running[:1], capture.running):
            raise StrictError(
                f"strict: Dynamo gave up on {frame.function} and runs it uncompiled. At {frame.place}: {frame.reason}."
                f"{remedy(str(frame.place), frame.reason)} Change that line, {_WITHOUT}"
            )


def refuse_capture(capture: Capture, options: BackendOptions, log: CompileLog) -> None:
    """Refuse a graph that ends in a graph break or follows one, and a function that is compiled too often.

    Raises:
        StrictError: Names the place, torch's reason and what to do.
    """
    if capture.ends_in is not None and ITS_OWN_FRAME not in capture.ends_in.reason:
        _refuse_break(str(capture.ends_in.place), capture.ends_in.reason, capture)
    restart = log.restart_reason(capture.function) or "torch gives no reason"
    if capture.resumes_at is not None and ITS_OWN_FRAME not in restart:
        place = f"{capture.function.file}:{capture.resumes_at} ({capture.function.function})"
        _refuse_break(place, restart, capture)
    last = recompile_limit()
    if capture.times > options.recompile_limit or (capture.times > 1 and capture.times >= last):
        bound = (
            f"option 'recompile_limit' is {options.recompile_limit}"
            if capture.times > options.recompile_limit
            else f"torch._dynamo.config.recompile_limit is {last}: this would be the last time before Dynamo runs the "
            "function uncompiled"
        )
        guard = in_words(capture.recompile_reason) or "unknown"
        raise StrictError(
            f"strict: compile {capture.times} of {capture.where}, and {bound}. The guard that "
            f"failed: {guard}. Keep that value the same between calls (for sizes: dynamic=True, or "
            f"torch._dynamo.mark_dynamic), raise the limit, {_WITHOUT}"
        )


def refuse_without_effect(request: CompileRequest) -> None:
    """Refuse options that change nothing in the graphs of this model.

    Raises:
        StrictError: Names the option, what was found and what to do.
    """
    if not request.trains:
        return
    if any(axis.role is AxisRole.TENSOR for axis in request.facts.axes):
        return
    options = request.options
    if options.partition_activations or options.sequence_parallel:
        name = "option 'partition_activations'" if options.partition_activations else "option 'sequence_parallel'"
        raise StrictError(
            f"strict: {name} has no effect: the model has no tensor-parallel operator. "
            f"Call dsgraph.tensor_parallel first, or drop the option, {_WITHOUT}"
        )


def refuse_compile(record: CompileEntry) -> None:
    """Refuse what was asked for and not done.

    Checkpoint regions that were not honoured, ops without a lowering, passes that switch caches off.

    Raises:
        StrictError: Names the value, op or pass, its place and what to do.
    """
    where = record.capture.where
    for tag in record.ignored_tags:
        raise StrictError(
            f"strict: {tag.name} ({tag.saved_bytes} bytes, from {tag.place or where}) is kept for the backward, though "
            "its checkpoint region asks to recompute it: remove the backward hook on it or the pass that "
            f"keeps it, {_WITHOUT}"
        )
    for op, calls in record.unlowered:
        if not is_own_op(op):
            raise StrictError(
                f"strict: Inductor has no lowering of {op} ({calls} calls in the graphs of {where}) and runs it as it "
                f"is: register one (torch._inductor.lowering.register_lowering), {_WITHOUT}"
            )
    if record.unidentified:
        raise StrictError(
            f"strict: pass {record.unidentified[0]} cannot be identified, so that torch's caches were off for {where}: "
            f"define it in a file, without variables of an enclosing function, or give it a `fingerprint`, {_WITHOUT}"
        )


def refuse_unused_kernels(records: Sequence[CompileEntry]) -> None:
    """Refuse kernels that were asked for and are found in no graph of a model.

    Raises:
        StrictError: Names the kernel, what was found and what to do.
    """
    runs = [item for record in records for item in record.passes]
    for name in dict.fromkeys(run.name for run in runs):
        notes = [run.notes for run in runs if run.name == name]
        for note in notes[0]:
            if note.endswith(NOWHERE) and all(note in each for each in notes):
                others = dict.fromkeys(other for each in notes for other in each if not other.endswith(NOWHERE))
                found = "; ".join(others) or "the graph contains nothing similar"
                where = records[0].capture.where + f" and {len(notes) - 1} more" * (len(notes) > 1)
                is_option = name == SparsifyAttention().name
                what, drop = ("", "the option") if is_option else ("kernel ", "it from 'kernels'")
                raise StrictError(f"strict: {what}{note} of {where}: {found}. Drop {drop}, {_WITHOUT}")


def _refuse_break(place: str, reason: str, capture: Capture) -> None:
    raise StrictError(
        f"strict: graph break at {place}, in the compile of {capture.where}. Torch's reason: {reason}."
        f"{remedy(place, reason)} Change that line, {_WITHOUT}"
    )
