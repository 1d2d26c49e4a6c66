"""The operations of one model outside compiled graphs, which its ranks compare before they communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.distributed.tensor import DeviceMesh, Placement

from dsgraph.compat.dtensor import replicated_value, watched
from dsgraph.compat.modules import OPTIMIZER_STEP
from dsgraph.compat.process_groups import watch_checkpoints
from dsgraph.passes.compat import detect_fake_mode
from dsgraph.utils.errors import RanksDisagreeError

from .eager_agreement import compare_checkpoint, eager_agreements, is_outside, is_running
from .mesh import mesh_ranks, ranks_along
from .rank_notes import Intent

FULL_TENSORS = (
    "For a file with full tensors call engine.export, model.save_pretrained or torch.distributed.checkpoint.state_dict."
    "get_model_state_dict with full_state_dict=True on all ranks, or `dsgraph export` on a checkpoint"
)


@dataclass(eq=False)
class ModelOperations:
    """The operations of one model that its ranks compare.

    Attributes:
        mesh: The mesh of its parameters.
        groups_of_rows: Names of the process groups whose ranks a gather of a parameter needs.
        label: Suffix that distinguishes its parameters from those of other models, for messages: " of model 2".
        updates: Number of steps that optimizers have made on its parameters.
        settle: Finishes running plans before an operation outside a forward or backward.
    """

    mesh: DeviceMesh
    groups_of_rows: tuple[str, ...]
    label: str = ""
    updates: int = 0
    settle: Callable[[], None] = field(default=lambda: None, repr=False)

    def number_among_models(self) -> None:
        """Set the label, by the number of models that the same ranks have partitioned. All ranks call it together."""
        agreement = eager_agreements.over(self.mesh, self._ranks)
        agreement.models += 1
        watch_checkpoints(compare_checkpoint)
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
        if outside:
            self.settle()
        agreement = eager_agreements.over(self.mesh, self._ranks_of_rows)
        intent = Intent(f"gathers {what}{self.label}", outside, step=self.updates)
        return agreement.on(intent, waits=waits or outside)

    def reducing(self, what: str) -> AbstractContextManager[None]:
        """Compare a reduction, which is over all ranks."""
        intent = Intent(f"reduces {what}{self.label}", step=self.updates)
        return eager_agreements.over(self.mesh, self._ranks).on(intent)

    def gathering_shards(self, shape: Sequence[int]) -> AbstractContextManager[None]:
        """Compare before torch gathers the shards of a tensor: a parameter, a gradient or state.

        Callers of `replicated_value` have compared what they do.
        """
        if is_running(replicated_value.__code__) or detect_fake_mode() is not None:  # a compiler
            return nullcontext()
        outside = is_outside() and not is_running(OPTIMIZER_STEP)  # a step, which is compared, need not wait
        # Over two dimensions of a mesh, ranks may hold unequal numbers of rows at this point.
        what = list(shape) if self.mesh.ndim == 1 else f"of {len(shape)} dimensions"
        what = f"the shards of a tensor {what}, as full_tensor() and redistribute() do"
        return self.gathering(what, outside=outside)

    def pickling(self) -> None:
        """Compare before this rank pickles its rows, as `torch.save` of a state dict does."""
        agreement = eager_agreements.over(self.mesh, self._ranks_of_rows)
        try:
            with agreement.on(Intent(f"pickles its rows{self.label}", outside=True, step=self.updates), waits=True):
                pass
        except RanksDisagreeError as error:
            who = str(error).partition(". ")[0]
            raise RanksDisagreeError(
                f"torch.save on some ranks would write a part of each parameter: {who}. {FULL_TENSORS}"
            ) from None

    def pickling_shards(self) -> None:
        """Compare before `torch.save` pickles shards outside a state dict; what compilers pickle is not compared."""
        if is_running(torch.save.__code__):
            self.pickling()

    def watched(self, placements: Iterable[Placement]) -> list[Placement]:
        """Return the placements of a parameter, with which torch's collectives over its shards are compared."""
        return [watched(each, self) for each in placements]

    def agree(self, does: str) -> None:
        """Check that all ranks do the same now, between a backward and a forward, and have done the same before.

        Raises:
            RanksDisagreeError: Ranks do, or have done, different operations.
        """
        self.settle()
        agreement = eager_agreements.over(self.mesh, self._ranks)
        if agreement.patience:
            agreement.confirm(Intent(does + self.label, step=self.updates), between=True)

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted(mesh_ranks(self.mesh)))

    @cached_property
    def _ranks_of_rows(self) -> tuple[int, ...]:
        return ranks_along(self.mesh, self.groups_of_rows)
