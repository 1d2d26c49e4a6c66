"""The systems that train a model in parallel: how each one is set up for the same model, optimizer and ranks.

A system is imported where it is set up, so that no process holds one that it does not measure.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.gpt import GPT

Step = Callable[[Tensor, Tensor], Tensor]  # one step of training on (tokens, targets); returns the loss


@dataclass(frozen=True)
class System:
    """One system.

    Attributes:
        setup: Makes of a plain model the function that trains it; called on every rank.
        memory: Memory class: the ZeRO stage whose memory it needs. Ratios are taken within a class.
        is_peer: Whether dsgraph is compared with it.
        alone: Each rank trains the whole batch by itself, without any communication.
        world: Number of ranks, where it is not the run's.
        environ: Environment variables that must be set before it is imported.
        package: The distribution that it needs besides torch.
        micro_batches: Number of parts of a step's rows that go through the model one after the other. A step has as
            many times the rows.
        reductions: How often a step reduces each gradient.
    """

    setup: Callable[[GPT], Step]
    memory: int | None = None
    is_peer: bool = False
    alone: bool = False
    world: int | None = None
    environ: tuple[tuple[str, str], ...] = ()
    package: str | None = None
    micro_batches: int = 1
    reductions: int = 1

    @property
    def is_installed(self) -> bool:
        """True if its package is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


def _optimizer(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def trainer(
    model: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer | _PartOfOptimizer,
    *,
    micro_batches: int = 1,
    accumulating: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """Return a step of `micro_batches` parts, all but the last in `accumulating()`.

    Loss and gradients are their means.
    """

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        for part in range(micro_batches):
            with nullcontext() if part == micro_batches - 1 else accumulating():
                loss = model(tokens.chunk(micro_batches)[part], targets.chunk(micro_batches)[part]) / micro_batches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


class _PartOfOptimizer:
    """AdamW over the first of `parts` equal pieces of every parameter, as on a rank that holds one of them."""

    def __init__(self, model: GPT, parts: int) -> None:
        self._params = list(model.parameters())
        self._pieces = [param.detach().flatten()[: -(-param.numel() // parts)] for param in self._params]
        self._adam = torch.optim.AdamW(self._pieces, lr=1e-3, fused=True)

    def step(self) -> None:
        for param, piece in zip(self._params, self._pieces, strict=True):
            assert param.grad is not None
            piece.grad = param.grad.flatten()[: piece.numel()]
        self._adam.step()

    def zero_grad(self) -> None:
        self._adam.zero_grad()
        for param in self._params:
            param.grad = None


def _single(model: GPT, *, compiled: bool = False) -> Step:
    return trainer(torch.compile(model) if compiled else model, _optimizer(model))


def _compute(model: GPT, *, parts: int, micro_batches: int, compiled: bool) -> Step:
    optimizer = _PartOfOptimizer(model, parts)
    return trainer(torch.compile(model) if compiled else model, optimizer, micro_batches=micro_batches)


def _ddp(model: GPT, *, micro_batches: int = 1) -> Step:
    ddp = nn.parallel.DistributedDataParallel(model)
    return trainer(ddp, _optimizer(model), micro_batches=micro_batches, accumulating=ddp.no_sync)


def _fsdp2(model: GPT, *, compiled: bool = False, split_root: bool = False, by_block: bool = False) -> Step:
    """Shard each block, and the rest: together, or with `split_root` the embedding and the output layer each.

    The whole model is compiled: compiled block by block, as with `by_block`, its steps were no faster, and it needed as
    much memory.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    groups = [*model.blocks, *([model.embedding, [model.norm, model.head]] if split_root else []), model]
    for block in model.blocks if by_block else ():
        block.compile()
    for group in groups:
        fully_shard(group, mesh=mesh)
    return trainer(torch.compile(model) if compiled else model, _optimizer(model))


def _deepspeed(model: GPT, *, stage: int) -> Step:
    """With the bucket sizes that transformers derives from the model's width ("auto").

    DeepSpeed's own defaults are made for models a thousand times as large: buffers of 2 GB, and a stage 3 that gathers
    the whole model at once.
    Its stage 3 keeps what it gathered until the backward, because the whole model is nearer than its default
    `stage3_max_reuse_distance` of 10**9 elements: fewer bytes on the wire, more memory.
    """
    import deepspeed

    width = model.config.width
    zero = {"stage": stage, "reduce_bucket_size": width**2, "allgather_bucket_size": width**2}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": int(0.9 * width**2),
            "stage3_param_persistence_threshold": 10 * width,
        }
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only logs and learning-rate rules look at it
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # by default it clips at a norm of 1, which no other system does
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()  # sets gradients to zero as well
        return loss.detach()

    return step


def _dsgraph(
    model: GPT,
    *,
    stage: int,
    codegen: str,
    micro_batches: int = 1,
    reduce_once: bool | None = None,
    blocks: str | None = None,
    **options: object,
) -> Step:
    import dsgraph

    dsgraph.partition(model, stage=stage, blocks=blocks)
    if codegen != "inductor":  # which, given explicitly, would also compile light graphs around blocks
        options["codegen"] = codegen
    return trainer(
        torch.compile(model, backend="dsgraph", options=options),
        _optimizer(model),
        micro_batches=micro_batches,
        accumulating=partial(dsgraph.accumulate, model, reduce_once=reduce_once),
    )


def _deepspeed_systems() -> dict[str, System]:
    environ = (("DS_ACCELERATOR", "cpu"),)
    return {
        f"deepspeed-{stage}": System(
            partial(_deepspeed, stage=stage), memory=stage, is_peer=True, environ=environ, package="deepspeed"
        )
        for stage in (1, 2, 3)
    }


def _dsgraph_systems() -> dict[str, System]:
    return {
        f"dsgraph-{stage}{suffix}": System(partial(_dsgraph, stage=stage, codegen=codegen), memory=stage)
        for codegen, suffix in (("inductor", ""), ("eager", "-eager"))
        for stage in (0, 1, 2, 3)
    }


# What DeepSpeed's stage 3, which keeps what it gathers, takes of memory for the model of 27 M parameters: with as much
# for itself dsgraph's keeps parameters as well.
SPARE_BYTES = 477 * 10**6

# With the blocks of a model compiled once, without, and block by block by the system that does so.
FIRST_STEP = {
    "blocks": System(partial(_dsgraph, stage=3, codegen="inductor", blocks="auto"), memory=3),
    "blocks-eager": System(partial(_dsgraph, stage=3, codegen="eager", blocks="auto"), memory=3),
    "flat": System(partial(_dsgraph, stage=3, codegen="inductor", blocks="none"), memory=3),
    "flat-eager": System(partial(_dsgraph, stage=3, codegen="eager", blocks="none"), memory=3),
    "fsdp2-blocks": System(partial(_fsdp2, by_block=True), memory=3, is_peer=True),
    "blocks-0": System(partial(_dsgraph, stage=0, codegen="inductor", blocks="auto"), memory=0),
    "flat-0": System(partial(_dsgraph, stage=0, codegen="inductor"), memory=0),
}

# In the order of the table. `single` is the reference of losses, `single-compile` that of compile time; the same on all
# ranks at once shows how much of a compile time is owed to the ranks' sharing of the machine.
SYSTEMS = {
    "single": System(_single, alone=True, world=1),
    "single-compile": System(partial(_single, compiled=True), alone=True, world=1),
    "single-compile-each": System(partial(_single, compiled=True), alone=True),
    "ddp": System(_ddp, memory=0, is_peer=True),
    "fsdp2": System(_fsdp2, memory=3, is_peer=True),
    "fsdp2-compile": System(partial(_fsdp2, compiled=True), memory=3, is_peer=True),
    "fsdp2-split": System(partial(_fsdp2, split_root=True), memory=3, is_peer=True),
    "fsdp2-split-compile": System(partial(_fsdp2, compiled=True, split_root=True), memory=3, is_peer=True),
    **_deepspeed_systems(),
    **_dsgraph_systems(),
    "dsgraph-3-spare": System(partial(_dsgraph, stage=3, codegen="inductor", memory_limit=SPARE_BYTES), memory=3),
}


MICRO_BATCHES = 4

# Besides: steps of four micro-batches, whose gradients are reduced as late as the memory class lets them.
ACCUMULATING = {
    f"ddp-x{MICRO_BATCHES}": System(
        partial(_ddp, micro_batches=MICRO_BATCHES), memory=0, is_peer=True, micro_batches=MICRO_BATCHES
    ),
    **{
        f"dsgraph-{stage}-x{MICRO_BATCHES}{suffix}": System(
            partial(_dsgraph, stage=stage, codegen=codegen, micro_batches=MICRO_BATCHES),
            memory=stage,
            micro_batches=MICRO_BATCHES,
            reductions=1 if stage < 2 else MICRO_BATCHES,
        )
        for codegen, suffix in (("inductor", ""), ("eager", "-eager"))
        for stage in (0, 1, 2, 3)
    },
    **{
        f"dsgraph-2-once-x{MICRO_BATCHES}{suffix}": System(
            partial(_dsgraph, stage=2, codegen=codegen, micro_batches=MICRO_BATCHES, reduce_once=True),
            memory=1,  # it holds full gradients
            micro_batches=MICRO_BATCHES,
        )
        for codegen, suffix in (("inductor", ""), ("eager", "-eager"))
    },
    f"dsgraph-3-spare-x{MICRO_BATCHES}": System(
        partial(_dsgraph, stage=3, codegen="inductor", micro_batches=MICRO_BATCHES, memory_limit=SPARE_BYTES),
        memory=3,
        micro_batches=MICRO_BATCHES,
        reductions=MICRO_BATCHES,
    ),
}


def compute_systems(parts: int, *, compiled: bool = True) -> dict[str, System]:
    """Return the computation of a rank without communication: its own rows, and its part of the optimizer.

    Args:
        parts: Number of ranks that share the optimizer's work.
        compiled: True to use torch.compile.
    """
    return {
        compute_name(count): System(
            partial(_compute, parts=parts, micro_batches=count, compiled=compiled), world=1, micro_batches=count
        )
        for count in (1, MICRO_BATCHES)
    }


def compute_name(micro_batches: int) -> str:
    """Return the name of the reference of systems with so many micro-batches a step."""
    return "compute" if micro_batches == 1 else f"compute-x{micro_batches}"


def installed(names: Sequence[str], systems: Mapping[str, System]) -> list[str]:
    """Return those of the systems named whose packages are there; print which are not."""
    missing = [name for name in names if not systems[name].is_installed]
    if missing:
        print(f"left out, because the extra `peers` is not installed: {', '.join(missing)}", flush=True)
    return [name for name in names if name not in missing]
