"""The user's source lines of nodes, for errors, dumps and reports."""

from __future__ import annotations

import os
import re

import torch

# The package that this one is linked into. Compared as text, so links are not resolved.
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep  # noqa: PTH100, PTH120
"""The folder of dsgraph's own files, whose lines are never the user's."""

TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep  # noqa: PTH100, PTH120  # likewise

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def short_path(path: str) -> str:
    """Return a path relative to the current folder, if it is in there."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def user_source(stack_trace: str | None) -> tuple[str, str]:
    """Return `file:line` of the user's innermost frame in a stack trace, and its text; empty without one."""
    for path, line, code in reversed(_FRAME.findall(stack_trace or "")):
        if not path.startswith((OWN_FOLDER, TORCH_FOLDER)):
            return f"{short_path(path)}:{line}", code.strip()
    return "", ""
