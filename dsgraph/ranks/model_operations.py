"""The operations of one model outside compiled graphs, which its ranks compare before they communicate."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor import DeviceMesh

from .eager_agreement import eager_agreements, is_outside
from .mesh import mesh_ranks, ranks_along
from .rank_notes import Intent


@dataclass(eq=False)
class ModelOperations:
    """The operations of one model that its ranks compare.

    Attributes:
        mesh: The mesh of its parameters.
        groups_of_rows: Names of the process groups whose ranks a gather of a parameter needs.
        label: Suffix that distinguishes its parameters from those of other models, for messages: " of model 2".
        updates: Number of steps that optimizers have made on its parameters.
    """

    mesh: DeviceMesh
    groups_of_rows: tuple[str, ...]
    label: str = ""
    updates: int = 0

    def number_among_models(self) -> None:
        """Set the label, by the number of models that the same ranks have partitioned. All ranks call it together."""
        agreement = eager_agreements.over(self.mesh, self._ranks)
        agreement.models += 1
        self.label = f" of model {agreement.models}" if agreement.models > 1 else ""

    def gathering(self, what: str, *, waits: bool = False, outside: bool | None = None) -> AbstractContextManager[None]:
        """Compare a gather outside compiled graphs with those of the other ranks.

        Args:
            what: Name of the gathered tensor.
            waits: Wait for all ranks even if the operation followed the same one before. A gather outside a forward
                always waits.
            outside: True outside a forward; None: detect it.

        Raises:
            RanksDisagreeError: They are about to do different things, or it failed.
        """
        outside = is_outside() if outside is None else outside
        agreement = eager_agreements.over(self.mesh, self._ranks_of_rows)
        intent = Intent(f"gathers {what}{self.label}", outside, step=self.updates)
        return agreement.on(intent, waits=waits or outside)

    def reducing(self, what: str) -> AbstractContextManager[None]:
        """Compare a reduction, which is over all ranks."""
        intent = Intent(f"reduces {what}{self.label}", step=self.updates)
        return eager_agreements.over(self.mesh, self._ranks).on(intent)

    def pickling(self) -> AbstractContextManager[None]:
        """Compare before this rank pickles its rows, as `torch.save` of a state dict does."""
        intent = Intent(f"pickles its rows{self.label}", outside=True, step=self.updates)
        return eager_agreements.over(self.mesh, self._ranks_of_rows).on(intent, waits=True)

    def agree(self, does: str) -> None:
        """Check that all ranks do the same now, between a backward and a forward, and have done the same before.

        Raises:
            RanksDisagreeError: Ranks do, or have done, different operations.
        """
        agreement = eager_agreements.over(self.mesh, self._ranks)
        if agreement.patience:
            agreement.confirm(Intent(does + self.label, step=self.updates), between=True)

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted(mesh_ranks(self.mesh)))

    @cached_property
    def _ranks_of_rows(self) -> tuple[int, ...]:
        return ranks_along(self.mesh, self.groups_of_rows)
