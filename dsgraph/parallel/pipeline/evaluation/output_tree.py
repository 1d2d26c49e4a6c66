"""The structure of a model's output, from which it is made again out of the values of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsgraph.compat.tensors import flatten_tree, unflatten_tree
from dsgraph.utils.errors import PartitionError

_PLAIN = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class OutputTree:
    """The structure of a model's output: tuples, lists, dicts and classes that torch's pytrees know.

    Attributes:
        leaves: The numbers and texts among the leaves; None for tensors, and for objects of other classes.
        results: Leaf -> number of the graph's result.
        arguments: Leaf -> number of the argument that the model returns unchanged.
        problem: Why the output cannot be made again from these parts; empty if it can.
    """

    leaves: Sequence[Any]
    results: Mapping[int, int]
    arguments: Mapping[int, int]
    problem: str
    _spec: Any

    @staticmethod
    def of(output: Any, *, results: Sequence[Any], inputs: Sequence[Any], arguments: Sequence[Any]) -> OutputTree:
        """Return the structure of an output, without its values.

        Args:
            output: What the model returned.
            results: What its graph returned.
            inputs: What its graph was given.
            arguments: The leaves of the model's arguments.
        """
        leaves, spec = flatten_tree(output)
        fixed, given = _places(inputs), _places(arguments)
        computed = {key: number for key, number in _places(results).items() if key not in fixed}
        tensors = {number: id(leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        of_results = {number: computed[key] for number, key in tensors.items() if key in computed}
        of_arguments = {number: given[key] for number, key in tensors.items() if key in given}
        problem = ""
        if not tensors:
            problem = (
                f"it is a {type(output).__name__}, in which no tensor is found: return a tuple, a dict or a class that "
                "is registered with torch.utils._pytree"
            )
        elif len(of_results) + len(of_arguments) < len(tensors):
            problem = "a tensor in it is neither computed nor an argument, such as a parameter: leave it out"
        plain = [leaf if isinstance(leaf, _PLAIN) else None for leaf in leaves]
        return OutputTree(plain, of_results, of_arguments, problem, spec)

    def filled(self, results: Mapping[int, Tensor], arguments: Mapping[int, Tensor]) -> Any:
        """Return an output with these values of results and arguments, by their numbers."""
        leaves = list(self.leaves)
        for number, source in self.results.items():
            leaves[number] = results[source]
        for number, source in self.arguments.items():
            leaves[number] = arguments[source]
        return unflatten_tree(leaves, self._spec)

    def check(self) -> None:
        """Raise an error if the output cannot be made again.

        Raises:
            PartitionError: Says why.
        """
        if self.problem:
            raise PartitionError(f"pipeline: the model's output cannot be returned: {self.problem}")


def _places(values: Sequence[Any]) -> dict[int, int]:
    """Return the place of each tensor, by its identity."""
    return {id(value): number for number, value in enumerate(values) if isinstance(value, Tensor)}
