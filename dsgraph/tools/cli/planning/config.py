"""`dsgraph config`: what a configuration of the engine comes to."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.cli.table import table

if TYPE_CHECKING:
    from dsgraph.engine.config.read_config import ResolvedConfig

_DESCRIPTION = """\
Prints what a configuration of the training engine comes to on so many ranks: batch sizes, every key with its value,
keys that have no effect, the passes that will run, and what a rank holds of a model between two steps."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a JSON file, as DeepSpeed has it")
    parser.add_argument("--ranks", metavar="N", type=int, default=1, help="data-parallel ranks (default: 1)")
    parser.add_argument(
        "--parameters",
        metavar="N",
        type=float,
        help="parameters of the model, such as 7e9: bytes of a rank are printed",
    )


def _run(arguments: argparse.Namespace) -> Answer:
    from dsgraph.engine.config.read_config import load_config, read_config
    from dsgraph.engine.optimizers.section import check_config
    from dsgraph.utils.errors import ConfigError

    if arguments.ranks < 1:
        raise CommandError(f"--ranks is {arguments.ranks}; it takes 1 or more")
    try:
        resolved = read_config(arguments.file, ranks=arguments.ranks)
        passes = _passes(resolved)
        is_divided = bool(load_config(arguments.file).get("parallel"))
        notes = [*resolved.notes, *check_config(resolved.config, is_divided=is_divided)]
    except ConfigError as error:
        raise CommandError(str(error)) from None
    data = {
        "batch": vars(resolved.batch),
        "config": resolved.config.model_dump(mode="json"),
        "notes": notes,
        "passes": passes,
    }
    if arguments.parameters is not None:
        data["bytes"] = _bytes(resolved, arguments.parameters, arguments.ranks)
    return Answer(_text(data), data)


def _passes(resolved: ResolvedConfig) -> list[str]:
    import torch

    from dsgraph.compiler.options import parse_options
    from dsgraph.compiler.pipeline import build_pipeline
    from dsgraph.engine.config.options import backend_options
    from dsgraph.passes import CaptureFacts, ParamInfo

    config = resolved.config
    if not config.dsgraph.compile:
        return []
    tier = "disk" if config.zero_optimization.offload_param.device == "nvme" else ""
    some = ParamInfo("", (2,), (1,), torch.float32, "shard", requires_grad=True, tier=tier)
    options = parse_options(backend_options(config), {})
    return [item.name for item in build_pipeline(options, CaptureFacts(params={0: some}))]


def _bytes(resolved: ResolvedConfig, parameters: float, ranks: int) -> dict[str, float]:
    """What a rank holds between two steps, with the two averages of Adam in float32."""
    from dsgraph.partitioning.stages import STAGES, CopyLifetime

    config = resolved.config
    zero = STAGES[config.zero_optimization.stage]
    shards = parameters / (ranks if zero.splits_parameters else 1)
    compute = 2 if config.fp16.enabled or config.bf16.enabled else 4
    return {
        "parameters": 4 * shards,
        "gathered copies": compute * parameters if zero.copy_lifetime is CopyLifetime.ALWAYS else 0.0,
        "gradients": 4 * shards,
        "optimizer state, as of Adam": 8 * shards,
    }


def _text(data: dict[str, Any]) -> str:
    from dsgraph.tools.dumping.render import bytes_text

    batch = data["batch"]
    parts = [
        f"batch: {batch['step']} samples a step, {batch['micro']} a micro-batch of a rank, "
        f"{batch['micro_batches']} micro-batches",
        table([[key, value] for key, value in _flat(data["config"])], ("key", "value")),
    ]
    parts += [f"note: {note}" for note in data["notes"]]
    parts.append(
        f"passes: {', '.join(data['passes'])}" if data["passes"] else "passes: none, the model is not compiled"
    )
    if "bytes" in data:
        rows = [[name, bytes_text(size)] for name, size in data["bytes"].items()]
        parts.append(
            table([*rows, ["sum", bytes_text(sum(data["bytes"].values()))]], ("a rank holds", "bytes"), right={1})
        )
    return "\n\n".join(parts)


def _flat(config: dict[str, Any], path: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value and path.count(".") < 1 and key != "params":
            found += _flat(value, f"{path}{key}.")
        elif value is not None:
            found.append((f"{path}{key}", str(value)))
    return found


COMMAND = Command(
    name="config",
    help="what a configuration of the engine comes to",
    description=_DESCRIPTION,
    configure=_configure,
    run=_run,
)
