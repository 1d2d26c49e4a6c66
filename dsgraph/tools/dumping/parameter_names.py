"""Names of a graph's parameters in the partitioned model, see `GraphInput.model_name`."""

from __future__ import annotations

from torch.fx import Node

from dsgraph.passes import CaptureFacts, PassContext, Phase
from dsgraph.passes.compat import captured_gradients


class ParameterNames:
    """The names that a dump shows. Passes know parameters by their names in the called module."""

    def __init__(self, facts: CaptureFacts | None = None) -> None:
        self._facts = facts or CaptureFacts()
        self._of_blocks = {info.name for info in self._facts.block_params.values()}
        self._in_model = {item.parameter: item.model_name for item in self._facts.roles.values() if item.model_name}

    def in_model(self, name: str) -> str:
        """Return the name in the model; the name itself if there is no other."""
        return self._in_model.get(name, name)

    def of_input(self, node: Node, ctx: PassContext) -> str:
        """Return the parameter that an input is, or is the shard of, or is the full value of in a block."""
        if node.name in ctx.params:
            return self.in_model(ctx.params[node.name].name)
        if node.name in ctx.roles and ctx.roles[node.name].parameter in self._of_blocks:
            return self.in_model(ctx.roles[node.name].parameter)
        return ""

    def of_gradients(self, output: Node, ctx: PassContext) -> dict[str, str]:
        """Return output number -> parameter whose gradient it is."""
        found = {number: self.in_model(name) for number, name in ctx.gradients.items()}
        if ctx.phase in (Phase.JOINT, Phase.BACKWARD):
            origins = captured_gradients(output).items()
            blocks = self._facts.block_params
            found |= {number: self.in_model(blocks[origin].name) for number, origin in origins if origin in blocks}
        return {str(number): found[number] for number in sorted(found)}
