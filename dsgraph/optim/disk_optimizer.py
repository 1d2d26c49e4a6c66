"""An optimizer whose state is on disk, and in memory for a few parameters at a time.

    step    read chunk 0 | read chunk 1 | read chunk 2 ...
                         | step chunk 0 | step chunk 1 ...
                                        | write chunk 0 ...

The arithmetic is that of the optimizer that is wrapped: it steps on one chunk of its parameters after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsgraph.inductor_ext.transfers.buffer_pool import Buffer
from dsgraph.offload.chunk_sizes import CHUNK_BYTES
from dsgraph.offload.read_rows import ReadRows
from dsgraph.partitioning.rows import own_part
from dsgraph.utils.errors import OffloadError

from .beside_backward import BesideBackward, Numbers
from .chunks import Chunk, chunks_of, new_state
from .hooks import WrappedOptimizer, check_elementwise, evaluated
from .stored_state import ChunkStore, StoredState

_AHEAD = 2  # chunks whose state is read before anybody steps


class DiskOptimizer(WrappedOptimizer):
    """A wrapper of an optimizer whose large state tensors are in a file. Groups are those of the inner optimizer.

    Attributes:
        inner: The optimizer that steps. It holds no state between steps.
        state: The state in the file, see `StoredState`.
        tier: The place of the state.
    """

    tier: ClassVar[str] = "disk"
    has_state_on_disk = True

    def __init__(self, inner: Optimizer, *, folder: Path, ratio: float = 1.0, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Take over an optimizer, and reserve space on disk for its state.

        Args:
            inner: An optimizer of parameters on the CPU that has not stepped.
            folder: A folder on the disk.
            ratio: The share of the state's bytes on disk; the state of the last parameters stays in memory.
            chunk_bytes: See `CHUNK_BYTES`; a parameter whose state takes more is a chunk of its own.

        Raises:
            OffloadError: `ratio` is not a share, the optimizer is not element-wise, parameters are not on the CPU, or
                the disk has too few bytes free.
        """
        params = [param for group in inner.param_groups for param in group["params"]]
        _check(inner, params)
        if not 0 < ratio <= 1:
            raise OffloadError(f"ratio is {ratio!r}; it takes a share, above 0 and up to 1")
        super().__init__(inner)
        self.chunks = chunks_of(inner, chunk_bytes)
        self._store = ChunkStore([chunk.size for chunk in self.chunks], ratio=ratio, folder=folder)
        self._stored = StoredState(self.chunks, self._store)
        self._failure: BaseException | None = None
        self._beside: BesideBackward | None = None  # what a backward has begun, until `step`

    @property
    def path(self) -> Path:
        """The file."""
        return self._store.file.path

    def close(self) -> None:
        """Remove the file and end its threads. The state on disk is deleted, and no `step` is possible afterwards."""
        self._store.file.close()

    @property
    def begun(self) -> int:
        """Number of chunks whose update the backward has begun, in a step that is not over."""
        return 0 if self._beside is None else len(self._beside.begun)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file."""
        return sum(self._store.file.sizes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory for state: that of the state that stays there, and the buffers for the rest."""
        return self._store.memory_bytes

    @property  # type: ignore[override]
    def state(self) -> StoredState:
        """The state by parameter, partly on disk."""
        return self._stored

    @state.setter
    def state(self, value: Mapping[Tensor, dict[str, Any]]) -> None:
        if "_stored" in self.__dict__:  # torch's constructor sets an empty one first
            self._stored.clear()
            for param, found in value.items():
                self._stored[param] = found

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the result of `load_state_dict`."""
        found = dict(state)
        stored = found.pop("state")
        super().__setstate__(found)
        self.inner.param_groups = self.param_groups
        self.state = stored

    @contextmanager
    def beside_backward(self) -> Iterator[None]:
        """Update parameters on disk as soon as their gradients arrive, in the last backward of a step.

            with optimizer.beside_backward():
                loss.backward()
            optimizer.step()  # waits, and does the rest

        `step` must follow, with unchanged gradients, learning rates and other options: then the results are the same.
        The rest are parameters in memory, and those that several graphs, or code outside graphs, read in the forward.

        Raises:
            OffloadError: The optimizer waits for its `step`, or an earlier one has failed.
        """
        self.refuse_failed()
        if self._beside is not None:
            raise OffloadError("beside_backward: the previous backward has begun a step: call optimizer.step() first")
        beside = self._beside = BesideBackward(self.chunks, self.param_groups)
        try:
            with beside.listening(self._step_chunks):
                yield
        except BaseException as error:
            self._beside = None
            if beside.begun:
                self._failure = error
                beside.give_up()
            raise
        if not beside.begun:
            self._beside = None

    def start_reading(self) -> None:
        """Start to read the state of the first chunks for the next `step`, while the gradient norm is computed."""
        if self._failure is None and self._beside is None:
            for number in [at for at, chunk in enumerate(self.chunks) if _has_gradients(chunk)][:_AHEAD]:
                self._stored.read_ahead(number)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises:
            OffloadError: The file could not be read or written. Some parameters may be updated and others not; every
                later step is refused.
        """
        loss = evaluated(closure)
        self.refuse_failed()
        beside = self._beside or BesideBackward(self.chunks, self.param_groups)
        if beside.is_listening:
            raise OffloadError("step was called inside beside_backward: call it after the `with` block")
        self._beside = None
        try:
            beside.finish()
            left = [at for at, chunk in enumerate(self.chunks) if at not in beside.begun and _has_gradients(chunk)]
            self._step_chunks(Numbers([*left, None]))
        except Exception as error:
            self._failure = error
            raise
        stepped = [param for chunk in self.chunks for param in chunk.params if param.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients.

        Raises:
            OffloadError: A backward has begun the step, which can no longer be abandoned.
        """
        if self._beside is not None and self._beside.begun:
            raise OffloadError(
                "zero_grad: the backward has updated parameters with these gradients: call optimizer.step() first"
            )
        super().zero_grad(set_to_none)

    def state_on_disk(self, param: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of a parameter's state that are on disk, by name."""
        return self.state.tensors(param)

    def take_state(self, state: StoredState, param: Tensor, found: dict[str, Any]) -> None:
        """Store what a checkpoint has of a parameter besides the tensors on disk."""
        state.take_rest(param, found)

    def refuse_load(self) -> None:
        """Raise an `OffloadError` if a backward has begun a step."""
        if self.begun:
            raise OffloadError("the backward has begun to update parameters: call optimizer.step() before loading")

    def refuse_steps(self, failure: BaseException | None) -> None:
        """Refuse every later step because of a failure; None: parameters and state were loaded since."""
        self._failure = failure

    def refuse_failed(self) -> None:
        """Refuse to use parameters and state after a failure.

        Raises:
            OffloadError: An earlier step or load has failed, and nothing was loaded since.
        """
        if self._failure is not None:
            raise OffloadError(
                f"an earlier step or load failed, and state is lost: load a checkpoint ({self._failure})"
            )

    @torch.no_grad()
    def _step_chunks(self, numbers: Numbers) -> None:
        writing: Sequence[Future[None]] = ()
        reading = self._start_next(numbers, wait=True)
        while reading is not None:
            number, parameters, buffer = reading.number, reading.parameters, reading.state.result()
            _wait_for(writing)
            following = self._start_next(numbers, wait=False)
            with self._holding(number, buffer, parameters) as leaves:
                self.inner.step()
                self._stored.take_over(number, buffer, [self.inner.state[leaf] for leaf in leaves])
            writing = [self._store.write(number, buffer), *(item.write() for item in parameters.values())]
            reading = following or self._start_next(numbers, wait=True)
        _wait_for(writing)

    def _start_next(self, numbers: Numbers, *, wait: bool) -> _Reading | None:
        """Start to read the state of the next chunk, and its parameters that are on disk as well."""
        number = numbers.next(wait=wait)
        if number is None:
            return None
        chunk = self.chunks[number]
        on_disk = {
            param: ReadRows(rows)
            for param, rows in zip(chunk.params, chunk.stored, strict=True)
            if rows is not None and rows.has_gradient
        }
        return _Reading(number, on_disk, self._stored.start_read(number))

    @contextmanager
    def _holding(self, number: int, buffer: Buffer, parameters: Mapping[Tensor, ReadRows]) -> Iterator[list[Tensor]]:
        """Let the inner optimizer hold only one chunk during the block: this rank's rows, with gradients and state."""
        chunk, groups = self.chunks[number], self.inner.param_groups
        leaves = [
            parameters[param].rows() if param in parameters else own_part(param).detach() for param in chunk.params
        ]
        for leaf, param, places in zip(leaves, chunk.params, chunk.places, strict=True):
            if param in parameters:
                leaf.grad = parameters[param].grad()
            else:
                leaf.grad = None if param.grad is None else own_part(param.grad)
            known = self._stored.small(param)
            if known is not None:
                self.inner.state[leaf] = {**known, **{place.key: place.view(buffer, leaf) for place in places}}
        self.inner.param_groups = [
            {**group, "params": [leaf for leaf, of in zip(leaves, chunk.groups, strict=True) if of == at]}
            for at, group in enumerate(groups)
        ]
        try:
            yield leaves
        finally:
            self.inner.param_groups = groups
            self.inner.state = new_state(self.inner)


@dataclass(frozen=True)
class _Reading:
    """A chunk that is being read: its number, its parameters on disk, its state."""

    number: int
    parameters: Mapping[Tensor, ReadRows]
    state: Future[Buffer]


def _wait_for(writing: Sequence[Future[None]]) -> None:
    for future in writing:
        future.result()


def _check(inner: Optimizer, params: Sequence[Tensor]) -> None:
    check_elementwise(inner)
    elsewhere = next((param for param in params if own_part(param).device.type != "cpu"), None)
    if elsewhere is not None:
        raise OffloadError(
            f"{type(inner).__name__} holds parameters on {elsewhere.device.type}; state on disk needs "
            "parameters on the CPU"
        )


def _has_gradients(chunk: Chunk) -> bool:
    return any(param.grad is not None for param in chunk.params)
