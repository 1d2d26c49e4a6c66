"""Access of an optimizer to parameters in a file: read rows and gradient, write rows back."""

from __future__ import annotations

from concurrent.futures import Future

from torch import Tensor

from .stored_rows import StoredRows, view_in


class ReadRows:
    """A parameter and its gradient, read completely for an update that is written back."""

    def __init__(self, stored: StoredRows) -> None:
        """Start to read."""
        self._stored = stored
        self._rows, self._grad = stored.read()

    def rows(self) -> Tensor:
        """Return the rows, `[r, *]`, in memory."""
        return view_in(self._rows.result(), self._stored.rows)

    def grad(self) -> Tensor:
        """Return the gradient, `[r, *]`, in memory."""
        return view_in(self._grad.result(), self._stored.grad)

    def write(self) -> Future[None]:
        """Start to write the parameter back. Neither tensor may be used any more."""
        self._stored.give_back(self._grad.result())
        self._stored.drop_pages()
        return self._stored.write_buffer(self._rows.result())
