"""Models of transformers: seconds to the first step, and of a step, beside FSDP2 with each block compiled.

    python -m benchmarks.families --json families.json

2 ranks, stage 3, empty caches for each system, Inductor's code. The models are narrow and deep. Columns:
    family        the model; encoder-decoders have `layers` of both
    system        `dsgraph`: `partition` and `torch.compile`; `fsdp2`: `fully_shard` and `compile` of each block
    first_step_s  seconds of the first step, the slowest rank's
    step_s        seconds a step, median over steps of both systems in turn
    loss          of the last step; the systems train alike
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.report import Check, Report, Row, add_arguments
from benchmarks.workers import WorkerError, Workers

STEPS = 6
VOCABULARY = 128
_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
_BERT = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model: Its class in transformers.
        config: Its type of configuration.
        layers: The option for the number of layers.
        sizes: Other options.
        lists: The lists of blocks, by name.
    """

    model: str
    config: str
    layers: str
    sizes: dict[str, Any]
    lists: tuple[str, ...]


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", "num_hidden_layers", _LLAMA, ("model.layers",)),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", "num_hidden_layers", _LLAMA | {"head_dim": 16}, ("model.layers",)),
    "gpt2": Family("GPT2LMHeadModel", "gpt2", "n_layer", {"n_embd": 64, "n_head": 4}, ("transformer.h",)),
    "bert": Family("BertForMaskedLM", "bert", "num_hidden_layers", _BERT, ("bert.encoder.layer",)),
    "mixtral": Family(
        "MixtralForCausalLM", "mixtral", "num_hidden_layers", _LLAMA | {"num_local_experts": 4}, ("model.layers",)
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "t5",
        "num_layers",
        {"d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0},
        ("encoder.block", "decoder.block"),
    ),
    "vit": Family(
        "ViTForImageClassification",
        "vit",
        "num_hidden_layers",
        _BERT | {"image_size": 32, "patch_size": 8},
        ("vit.encoder.layer", "vit.layers"),  # by versions of transformers
    ),
}
SYSTEMS = ("dsgraph", "fsdp2")


class FamilyTraining:
    """One system's training of a family on this rank."""

    def __init__(self, family: str, system: str, layers: int) -> None:
        """Set the system up, with the same weights on all ranks."""
        import transformers

        self._family = FAMILIES[family]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            self._family.config, **{self._family.layers: layers}, **self._family.sizes
        )
        if hasattr(config, "vocab_size"):
            config.vocab_size = VOCABULARY
        config.use_cache = False
        model = getattr(transformers, self._family.model)(config).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self._model = _setup(model, system, self._family.lists)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._losses: list[float] = []

    def timed_steps(self, count: int) -> list[float]:
        """Return the seconds of each of the next steps, from one barrier to the next."""
        times = []
        for _ in range(count):
            batch = self._batch(torch.Generator().manual_seed(100 * len(self._losses) + dist.get_rank()))
            dist.barrier()
            started = time.perf_counter()
            loss = self._model(**batch).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._losses.append(loss.item())
            dist.barrier()
            times.append(time.perf_counter() - started)
        return times

    def last_loss(self) -> float:
        """Return this rank's loss of the last step."""
        return self._losses[-1]

    def _batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        if self._family.config == "vit":
            images = torch.randn(2, 3, 32, 32, generator=generator)
            return {"pixel_values": images, "labels": torch.randint(0, 2, (2,), generator=generator)}
        tokens = torch.randint(0, VOCABULARY, (2, 64), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def _setup(model: nn.Module, system: str, lists: Sequence[str]) -> Any:
    if system == "dsgraph":
        import dsgraph

        dsgraph.partition(model, stage=3)
        return torch.compile(model, backend="dsgraph")
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    modules = dict(model.named_modules())
    for name in lists:
        for block in modules.get(name, ()):  # type: ignore[attr-defined]
            block.compile()
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 when a system failed, otherwise 0, whatever the figures are."""
    options = _parse(arguments)
    report, errors = Report(), []
    for family in options.families:
        groups: dict[str, Workers] = {}
        rows: dict[str, Row] = {}
        times: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        try:
            for system in SYSTEMS:
                groups[system] = Workers(system, FamilyTraining, family, system, options.layers, world=2)
                first = max(groups[system].call("timed_steps", 1))[0]
                rows[system] = {"family": family, "layers": options.layers, "system": system, "first_step_s": first}
                print(f"{family}, {system}: first step {first:.2f} s", flush=True)
            for _ in range(2 + STEPS):
                for system, group in groups.items():
                    times[system].append(max(group.call("timed_steps", 1))[0])
            for system, group in groups.items():
                rows[system] |= {
                    "step_s": statistics.median(times[system][2:]),
                    "loss": statistics.fmean(group.call("last_loss")),
                }
                report.rows.append(rows[system])
        except WorkerError as error:
            errors.append(f"{family}: {error}")
        finally:
            for group in groups.values():
                group.close()
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    for error in errors:
        print(f"\nFAILED {error}", file=sys.stderr)
    return 1 if errors else 0


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach, from the rows that were measured."""
    found = {(row["family"], row["system"]): row for row in rows}
    return [
        Check(f"{family}: {what} over FSDP2's", ours[column] / theirs[column], limit, "lower")
        for family in FAMILIES
        if (ours := found.get((family, "dsgraph"))) and (theirs := found.get((family, "fsdp2")))
        for what, column, limit in (("first step", "first_step_s", 1.1), ("step", "step_s", 1.0))
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--layers", type=int, default=24, help="layers of each model, 24 by default")
    parser.add_argument("--families", type=_names, default=tuple(FAMILIES), help=f"some of {', '.join(FAMILIES)}")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers = 2
    return options


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown family {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
