"""Access to compiled models of `torch.compile`, to its backends and to its records."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

import torch


def is_compiled(model: object) -> bool:
    """Return True if `torch.compile(module)` returned `model`."""
    return isinstance(model, torch._dynamo.OptimizedModule)


def unwrap_compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` was given, if it returned `model`; else `model`."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model


def compiled_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules inside `model` that are compiled on their own: by `torch.compile(m)` or `m.compile()`."""
    found = []
    for module in model.modules():
        if isinstance(module, torch._dynamo.OptimizedModule):
            found.append(unwrap_compiled(module))
        elif module._compiled_call_impl is not None:
            found.append(module)
    return found


def register_backend(compiler: Callable[..., Any], name: str) -> None:
    """Make `torch.compile(backend=name)` find `compiler` where no installed entry point does.

    With an entry point torch registers the backend itself, right after importing this package, and insists on being
    the only one to do so.
    """
    from torch._dynamo.backends import registry

    if not entry_points(group="torch_dynamo_backends", name=name) and name not in registry._COMPILER_FNS:
        registry.register_backend(compiler, name=name)


def backend_named(name: str) -> Callable[..., Any]:
    """Return the backend that `torch.compile(backend=name)` would use."""
    from torch._dynamo.backends import registry

    return cast("Callable[..., Any]", registry.lookup_backend(name))


def compile_metrics() -> list[Any]:
    """Return Dynamo's record of each frame that it compiled or gave up; it keeps the last 64."""
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


def recompile_limit() -> int:
    """Return the number of times that Dynamo compiles a function before it runs it uncompiled."""
    return int(torch.compiler.config.recompile_limit)


def allowing_recompiles(functions: int = 256) -> Any:
    """Return a context in which Dynamo compiles a function so many times: for each bucket and batch size."""
    config: Any = torch.compiler.config
    of_all = max(config.accumulated_recompile_limit, 4 * functions)
    return config.patch(recompile_limit=functions, accumulated_recompile_limit=of_all)
