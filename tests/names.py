"""Names of functions in messages and reports."""

import sys


def reported(name: str) -> str:
    """Return the name under which a report shows `Class.function`: code of Python 3.10 does not know its class."""
    return name if sys.version_info >= (3, 11) else name.rpartition(".")[2]
