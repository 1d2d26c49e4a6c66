"""Source lines of captured graphs in the user's program, read while Dynamo compiles it."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType

import torch
from torch import nn
from torch.fx import GraphModule, Node

from dsgraph.compat.compiled import unwrap_compiled
from dsgraph.compat.dynamo import graph_break, traced_frame
from dsgraph.compat.modules import MODULE_CALL
from dsgraph.partitioning.blocks.repeated_blocks import is_block
from dsgraph.passes.ir.user_source import OWN_FOLDER, TORCH_FOLDER

_RESUMED = re.compile(r"^torch_dynamo_resume_in_.*_at_(\d+)$")
_EXPERTS = (
    "transformers' experts of implementation 'eager' depend on values: call "
    'model.set_experts_implementation("grouped_mm") before the first forward, which is captured'
)
_STACK_LINE = re.compile(r'^  File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)


@dataclass(frozen=True)
class SourceLine:
    """A line of a user's function."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" ({self.function})" if self.function else "")


@dataclass(frozen=True)
class GraphBreak:
    """A graph break: the place where Dynamo had to end a graph, and why.

    Attributes:
        place: The innermost of the user's lines.
        reason: Torch's reason, its first sentences.
        lines: File and line of every frame from the compiled function down to `place`.
        region: The line with the call of `checkpoint`, for a break inside a region, which torch then runs eagerly.
    """

    place: SourceLine
    reason: str
    lines: tuple[tuple[str, int], ...]
    region: SourceLine | None = None


@dataclass(frozen=True)
class SourceLines:
    """The lines of a function."""

    file: str
    first: int
    last: int

    @staticmethod
    def of(code: CodeType) -> SourceLines:
        """Return the lines of a code object."""
        lines = [line for *_, line in code.co_lines() if line is not None]
        return SourceLines(code.co_filename, code.co_firstlineno, max(lines, default=code.co_firstlineno))

    def holds(self, file: str, line: int) -> bool:
        """Return whether a line is one of the function's."""
        return file == self.file and self.first <= line <= self.last


@dataclass(frozen=True)
class Capture:
    """The origin of a captured graph.

    Attributes:
        function: The user's function and the line where it begins.
        resumes_at: The line of the graph break that this graph follows; None for a function's first graph.
        compile_id: Dynamo's name for the compile.
        times: Number of times that Dynamo has compiled the frame, this time included.
        recompile_reason: The guard that failed; empty at the first compile.
        ends_in: The graph break that ends the graph, if one does.
        region: The line that calls `torch.utils.checkpoint.checkpoint`, for a graph inside a region that runs eagerly.
        running: The user's functions that were running, the captured one first.
        called_at: The user's line that calls the captured function, if that is torch's own (`nn.Sequential.forward`).
        is_around_blocks: True if a module with repeated blocks calls it, and it contains none of them.
    """

    function: SourceLine
    resumes_at: int | None = None
    compile_id: str = ""
    times: int = 1
    recompile_reason: str = ""
    ends_in: GraphBreak | None = None
    region: SourceLine | None = None
    running: tuple[SourceLines, ...] = ()
    called_at: SourceLine | None = None
    is_around_blocks: bool = False

    @property
    def where(self) -> str:
        """Return the user's function, or the user's line that calls torch's function."""
        return str(self.function) if self.called_at is None else f"what {self.called_at} calls"

    @property
    def after(self) -> str:
        """A remark on the graph break before the graph: ` after line 12`; empty without one."""
        return f" after line {self.resumes_at}" if self.resumes_at else ""


def read_capture(gm: GraphModule) -> tuple[Capture, nn.Module | None]:
    """Return the origin of `gm`, and the module whose method it was captured from, or that called the function."""
    traced = traced_frame()
    if traced is None:
        return Capture(SourceLine("<unknown>", 0, "")), None
    stack = list(_user_frames(sys._getframe(1)))
    modules = list(_modules_called(traced.receiver, sys._getframe(1)))
    resumed = _RESUMED.match(traced.name)
    name = getattr(traced.code, "co_qualname", traced.code.co_name).rpartition("<locals>.")[2]
    caller = next(iter(stack), None) if is_torchs(traced.code.co_filename) else None
    capture = Capture(
        function=SourceLine(traced.code.co_filename, traced.code.co_firstlineno, name),
        resumes_at=int(resumed[1]) if resumed else None,
        compile_id=traced.compile_id,
        times=traced.times,
        recompile_reason=guard_of(traced.recompile_reason),
        ends_in=_break_of(gm),
        region=_region(sys._getframe(1)),
        running=tuple(SourceLines.of(code) for code in (traced.code, *(frame.f_code for frame in stack))),
        called_at=None
        if caller is None
        else SourceLine(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name),
        is_around_blocks=_are_around_blocks(modules, gm),
    )
    return capture, modules[0] if modules else None


def is_torchs(file: str) -> bool:
    """Return whether a source file is part of torch, or generated by it."""
    return file.startswith((TORCH_FOLDER, "<eval_with_key>", "<frozen "))


def first_sentences(reason: str) -> str:
    """Return the first line of one of Dynamo's reasons, and its explanation; of a disabled function its own reason."""
    own = re.search(r"wrapped with `torch\.compiler\.disable` \(reason: (?!None\))(.*)\)", reason)
    if own:
        return own[1]
    first, _, rest = reason.strip().partition("\n")
    explanation = re.search(r"^\s*Explanation: (.*)$", rest, re.MULTILINE)
    return f"{first}: {explanation[1].strip()}" if explanation else first


def user_line(stack_trace: str | None) -> SourceLine | None:
    """Return the innermost of the user's lines in a node's stack trace."""
    found = [SourceLine(file, int(line), name) for file, line, name in _STACK_LINE.findall(stack_trace or "")]
    own = [place for place in found if not is_torchs(place.file) and not place.file.startswith(OWN_FOLDER)]
    return own[-1] if own else None


def guard_of(reason: str) -> str:
    """Return the guard: `0/0: self.k == 0      # return self.a(x) * self.k ...` -> `self.k == 0`."""
    first = reason.strip().partition("\n")[0]
    return re.sub(r"^\d+/\d+: ", "", first).partition("  #")[0].strip()


def _break_of(gm: GraphModule) -> GraphBreak | None:
    found = graph_break(gm)
    if found is None:
        return None
    reason, stack = found
    own = [frame for frame in stack if not is_torchs(frame[0])] or stack
    file, line, function = own[-1] if own else ("<unknown>", 0, "")
    # Dynamo does not say that it was inside a region; the user's lines that lead there do.
    calls = [SourceLine(*frame) for frame in own[:-1] if "checkpoint(" in linecache.getline(frame[0], frame[1])]
    return GraphBreak(
        place=SourceLine(file, line, function),
        reason=first_sentences(reason),
        lines=tuple((file, line) for file, line, _ in stack),
        region=calls[-1] if calls else None,
    )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    for one in _frames(frame):
        file = one.f_code.co_filename
        if not is_torchs(file) and not file.startswith(OWN_FOLDER):
            yield one


def _modules_called(receiver: object, frame: FrameType | None) -> Iterator[nn.Module]:
    """Yield the modules whose calls are running, the innermost first."""
    if isinstance(receiver, nn.Module):
        yield unwrap_compiled(receiver)
    # Only torch's own frames: to read a frame's locals keeps them alive for as long as it runs.
    for one in _frames(frame):
        if one.f_code is MODULE_CALL:
            yield unwrap_compiled(one.f_locals["self"])


def _are_around_blocks(modules: Sequence[nn.Module], gm: GraphModule) -> bool:
    if any(map(is_block, modules)):
        return False
    classes = {type(inner) for module in modules for inner in module.modules() if is_block(inner)}
    return bool(classes) and not any(classes & _classes_of(node) for node in gm.graph.nodes)


def _classes_of(node: Node) -> set[type]:
    """Return the classes of the modules whose forwards a node comes from."""
    stack = node.meta.get("nn_module_stack") or {}
    return {found for _, found in stack.values() if isinstance(found, type)}


def _region(frame: FrameType | None) -> SourceLine | None:
    """Return the line that calls the innermost checkpoint region that is running."""
    frames = list(_frames(frame))
    for number, one in enumerate(frames):
        if one.f_code.co_name == "checkpoint" and one.f_code.co_filename == torch.utils.checkpoint.__file__:
            for outer in _user_frames(frames[number]):
                return SourceLine(outer.f_code.co_filename, outer.f_lineno, outer.f_code.co_name)
    return None


def remedy(*said: str) -> str:
    """Return a sentence that says how to make a line capturable; empty if no remedy is known.

    Args:
        *said: Place and reason in torch's words.
    """
    text = " ".join(said)
    depends_on_values = re.search(r"nonzero|data-dependent|[Dd]ynamic shape operator|\bexpert_", text)
    return f" {_EXPERTS}." if depends_on_values and re.search(r"transformers.models.\w+.modeling_", text) else ""
