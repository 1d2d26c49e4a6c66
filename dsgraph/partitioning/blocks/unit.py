"""The unit of a step that a captured graph is part of: a repeated block, or a module around the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dsgraph.compat.compiled import compiled_modules, unwrap_compiled
from dsgraph.partitioning.blocks.repeated_blocks import is_block, structure_of
from dsgraph.partitioning.state import partition_states


@dataclass(frozen=True)
class Unit:
    """A unit of a step, by names in the partitioned model.

    Attributes:
        module: The module that is being called; empty for the model, and for a function that no module calls.
        block: The repeated block, or the layer that is compiled by itself, that `module` is or is inside of; empty
            outside blocks.
        blocks: The blocks that may share the unit's graphs: `block` and its equals.
    """

    module: str = ""
    block: str = ""
    blocks: tuple[str, ...] = ()

    def shared_name(self, parameter: str) -> str:
        """Return a parameter's name with `*` for what differs between the blocks: "layers.*.up.weight"."""
        inside = parameter.startswith(f"{self.block}.") and self.block
        return self._shared + parameter.removeprefix(self.block) if inside else parameter

    def name_in(self, block: str, shared_name: str) -> str:
        """Return a parameter's name in one of the blocks."""
        inside = shared_name.startswith(f"{self._shared}.") and self.block
        return block + shared_name.removeprefix(self._shared) if inside else shared_name

    @property
    def _shared(self) -> str:
        """The blocks' name, with `*` for the parts that differ."""
        parts = [block.split(".") for block in self.blocks]
        if len({len(names) for names in parts}) != 1:
            return self.block
        return ".".join(names[0] if len(set(names)) == 1 else "*" for names in zip(*parts, strict=True))


WHOLE_MODEL = Unit()


def unit_of(module: nn.Module | None) -> Unit:
    """Return the unit of a graph that is captured while `module` is called."""
    states = partition_states(module) if module is not None else []
    return unit_in(states[0].root, module) if states else WHOLE_MODEL


def unit_in(model: nn.Module, module: nn.Module | None) -> Unit:
    """Return the unit of graphs of `module` by its name in `model`."""
    names: dict[nn.Module | None, str] = {}
    for name, inner in model.named_modules():
        names.setdefault(unwrap_compiled(inner), name)
    own = names.get(module, "")
    modules = {name: inner for inner, name in names.items() if name and inner is not None}
    return Unit(own, *_blocks_around(own, modules, model)) if own else WHOLE_MODEL


def _blocks_around(name: str, modules: Mapping[str, nn.Module], model: nn.Module) -> tuple[str, tuple[str, ...]]:
    """Return the block that a module is or is inside of, and its equals."""
    compiled = set(compiled_modules(model))
    apart = {place: inner for place, inner in modules.items() if is_block(inner) or inner in compiled}
    around = [place for place in apart if f"{name}.".startswith(f"{place}.")]
    blocks = [place for place in around if is_block(apart[place])] or around[-1:]
    if not blocks:
        return "", ()
    own = structure_of(apart[blocks[0]])
    equal = tuple(place for place, inner in apart.items() if structure_of(inner) == own)
    return (blocks[0], equal) if len(equal) > 1 or is_block(apart[blocks[0]]) else ("", ())
