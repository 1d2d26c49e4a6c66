"""AOTAutograd and Inductor: compiling a graph, and their settings."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule


def compile_with_inductor(
    gm: GraphModule, inputs: Sequence[Any], *, patches: dict[str, Any], cache_tag: str, anew: bool
) -> Callable[..., Any]:
    """Compile with AOTAutograd and Inductor; configuration patches hold for the backward, too.

    With `anew` AOTAutograd's cache is not used, so that all passes run.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    config: Any = torch.compiler.config

    @functools.wraps(compile_fx_inner)
    def compile_tagged(*args: Any, **kwargs: Any) -> Any:
        # The backward may be compiled long after this function is left.
        with config.patch(cache_key_tag=cache_tag):
            return compile_fx_inner(*args, **kwargs)

    cached = functorch_config.patch(enable_autograd_cache=False) if anew else contextlib.nullcontext()
    with config.patch(cache_key_tag=cache_tag), cached:
        compiled: Any = compile_fx(gm, inputs, inner_compile=compile_tagged, config_patches=patches or None)
    return cast("Callable[..., Any]", compiled)


def compile_with_aot(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    compiler: Callable[..., Any],
    inference_compiler: Callable[..., Any],
    partition_fn: Callable[..., Any],
) -> Callable[..., Any]:
    """Compile with AOTAutograd and our own compiler of the forward and the backward graph.

    A checkpointed region draws from the default generator, as it does uncompiled. For CUDA graphs, which these graphs
    never become, AOTAutograd would have it draw from a generator of its own, which `torch.manual_seed` does not reach.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config

    def compile_graph(graph_module: torch.fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            # These graphs do not reuse the memory of saved values: a backward may run twice.
            (context.fw_metadata.bw_donated_idxs or []).clear()
        return compiler(graph_module, graph_inputs)

    backend = aot_autograd(fw_compiler=compile_graph, inference_compiler=inference_compiler, partition_fn=partition_fn)
    with functorch_config.patch(graphsafe_rng_functionalization=False):
        return backend(gm, inputs)


def boxed(gm: GraphModule) -> Callable[..., Any]:
    """Return `gm` as AOTAutograd calls it: one list of inputs, each freed after its last use."""
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(args: list[Any]) -> Any:
        return gm.forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def inductor_mode(mode: str) -> dict[str, Any]:
    """Return Inductor's configuration for a `torch.compile` mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def uses_cudagraphs(settings: Mapping[str, Any]) -> bool:
    """Return True if Inductor uses CUDA graphs, given settings besides its configuration."""
    from torch._inductor import config

    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


def inductor_settings() -> list[str]:
    """Return the names of Inductor's settings; those of nested ones have a dot."""
    from torch._inductor import config

    return list(config.get_config_copy())


# Each moves, merges or replaces collectives or waits, or moves computation past them. Three are on by default:
# - the simple overlap of 2.15, which moves collectives earlier and waits later
# - the order for locality, in inference graphs
# - the search for an order of less memory. It does not know how long a transfer takes, and puts every wait right after
#   its start (7 % longer steps with a GPT of 27 M parameters on 2 ranks, gloo).
_MOVES_COLLECTIVES = {
    "_fuse_ddp_communication": False,
    "_micro_pipeline_tp": False,
    "aten_distributed_optimizations.allow_comms_decompositions": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_all_reduces_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "dedup_reduce_scatters": False,
    "reorder_for_compute_comm_overlap": False,
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
}


def keeping_order() -> dict[str, Any]:
    """Return the settings with which Inductor leaves collectives and waits where they are in the graph."""
    known = set(inductor_settings())  # these differ from version to version
    return {name: value for name, value in _MOVES_COLLECTIVES.items() if name in known}


def activation_memory_budget() -> float:
    """Return the share of activations that torch's own partitioner may save; 1.0 unless somebody has set it."""
    from torch._functorch import config as functorch_config

    return float(functorch_config.activation_memory_budget)


def autograd_cache_hits() -> int:
    """Return the number of compiles that AOTAutograd took from its cache in this process."""
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]["autograd_cache_hit"]


def runs_as_it_is(op: Any) -> bool:
    """Return True if Inductor calls an op as it is, because it has no lowering of it."""
    from torch._inductor.lowering import fallbacks, lowerings

    return op not in lowerings or op in fallbacks
