"""The range of torch releases that dsgraph supports."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Sequence

import torch

OLDEST_TORCH = (2, 11)

NEWEST_TORCH = (2, 15)

# One name from each private module without which no graph can be compiled, as `pkgutil.resolve_name` takes it.
PRIVATE_APIS = (
    "torch._C._distributed_c10d:_register_work",
    "torch._C._distributed_c10d:_resolve_process_group",
    "torch._C._functorch:peek_interpreter_stack",
    "torch._dynamo.backends.common:aot_autograd",
    "torch._dynamo.eval_frame:skip_code",
    "torch._dynamo.exc:ShortenTraceback",
    "torch._dynamo.resume_execution:ContinueExecutionCache.generated_code_metadata",
    "torch._dynamo.symbolic_convert:InstructionTranslator.current_tx",
    "torch._functorch._aot_autograd.descriptors:PlainAOTInput",
    "torch._functorch.config:cse",
    "torch._functorch.partitioners:min_cut_rematerialization_partition",
    "torch._guards:TracingContext.try_get",
    "torch._inductor.compile_fx:compile_fx_inner",
    "torch._inductor.config:custom_partitioner_fn",
    "torch._inductor.custom_graph_pass:CustomPartitionerFn",
    "torch._inductor.ir:_CollectiveKernel.create_out_of_place",
    "torch._inductor.ir:_WaitKernel.create_wait",
    "torch._inductor.lowering:register_lowering",
    "torch._library.fake_class_registry:FakeScriptObject",
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "torch.fx._lazy_graph_module:_use_lazy_graph_module",
)


def check_torch_version(version: str = torch.__version__, *, needed: Sequence[str] = PRIVATE_APIS) -> None:
    """Refuse a torch that is too old, and warn about one that is newer than all versions that were tested.

    A newer torch is searched for the private APIs that dsgraph uses. This imports Inductor, which takes seconds; no
    supported version is searched.

    Args:
        version: The version of torch.
        needed: Private APIs, each as "module:name".

    Raises:
        ImportError: `version` is too old, or newer than all tested versions and lacks one of `needed`.
    """
    found = _numbers(version)
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST_TORCH, NEWEST_TORCH))
    if found < OLDEST_TORCH:
        raise ImportError(
            f'dsgraph needs torch {oldest} or newer, but torch {version} is installed: pip install "torch>={oldest}"'
        )
    if found <= NEWEST_TORCH:
        return
    for name in needed:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"dsgraph was tested with torch {oldest} to {newest} and does not work with torch {version}, which has "
                f'no {name.replace(":", ".")}: install a newer dsgraph, or pip install "torch=={newest}.*"'
            ) from error
    warnings.warn(
        f"dsgraph was tested with torch {oldest} to {newest}, and torch {version} is newer. The private APIs of torch "
        "that dsgraph uses were found, but their behavior may have changed.",
        stacklevel=2,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
