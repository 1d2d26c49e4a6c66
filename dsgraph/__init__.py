"""dsgraph: distributed training as passes over the captured graph.

model = dsgraph.partition(model, mesh, stage=3)
model = torch.compile(model, backend="dsgraph")

`__init__.pyi` is the table of public names. A name is imported when it is first used, which also registers the backend.
If torch is already imported, the backend is registered at once. The command line reads dumps without importing torch,
which takes seconds.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _public_names() -> dict[str, str]:
    """Return the module of each public name."""
    table = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in table.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: "." * node.level + (node.module or "") for node in imports for alias in node.names}


_PUBLIC = _public_names()
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import_module("dsgraph.api")  # registers the backend
        value = globals()[name] = _attribute(_PUBLIC[name], name)
        return value
    raise AttributeError(f"module 'dsgraph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _attribute(module: str, name: str) -> Any:
    if module == ".":
        return import_module(f".{name}", __name__)
    return getattr(import_module(module, __name__), name)


if "torch" in sys.modules:
    import_module("dsgraph.api")
