"""`dsgraph config`: the settings that result from a configuration of the engine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.cli.table import table

if TYPE_CHECKING:
    from dsgraph.engine.config.engine_config import EngineConfig
    from dsgraph.engine.config.read_config import ResolvedConfig

_DESCRIPTION = """\
Print the effect of a configuration of the training engine on --ranks ranks: batch sizes, every key with its value, keys
that have no effect, the passes that will run, and the bytes of a model that a rank holds between two steps."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a JSON file in DeepSpeed's format")
    parser.add_argument("--ranks", metavar="N", type=int, default=1, help="data-parallel ranks (default: 1)")
    parser.add_argument(
        "--parameters",
        metavar="N",
        type=float,
        help="number of parameters of the model, such as 7e9: print the bytes of a rank",
    )


def _run(arguments: argparse.Namespace) -> Answer:
    from dsgraph.engine.config.read_config import read_config
    from dsgraph.engine.optimizers.optimizer_section import check_config
    from dsgraph.utils.errors import ConfigError

    if arguments.ranks < 1:
        raise CommandError(f"--ranks is {arguments.ranks}; it takes 1 or more")
    try:
        resolved = read_config(arguments.file, ranks=arguments.ranks)
        passes = _passes(resolved)
        notes = [*resolved.notes, *check_config(resolved.config)]
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
    return Answer(_text(data, resolved), data)


def _passes(resolved: ResolvedConfig) -> list[str]:
    import torch

    from dsgraph.compiler.build_pipeline import build_pipeline
    from dsgraph.compiler.options import parse_options
    from dsgraph.engine.config.options_of_config import backend_options
    from dsgraph.passes import CaptureFacts, ParameterSpec

    config = resolved.config
    if not config.dsgraph.compile:
        return []
    tier = "disk" if config.zero_optimization.offload_param.device == "nvme" else ""
    some = ParameterSpec("", (2,), (1,), torch.float32, "0", requires_grad=True, tier=tier)
    options = parse_options(backend_options(config), {})
    return [item.name for item in build_pipeline(options, CaptureFacts(params={0: some}))]


def _bytes(resolved: ResolvedConfig, parameters: float, ranks: int) -> dict[str, float]:
    """Return the bytes that a rank holds between two steps, with the two averages of Adam in float32."""
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


def _text(data: dict[str, Any], resolved: ResolvedConfig) -> str:
    from dsgraph.tools.dumping.render import bytes_text

    batch = data["batch"]
    parts = [
        f"batch: {batch['step']} samples per step, {batch['micro']} per micro-batch of a rank, "
        f"{batch['micro_batches']} micro-batches",
        table(_rows(resolved.config), ("key", "value", "sets")),
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


def _rows(config: EngineConfig) -> list[list[str]]:
    """Return each key that has a value, with the backend option or the argument of `partition` that it sets."""
    from dsgraph.engine.config.key import entries_of, is_set, section_of, value_at

    rows = []
    for path, field, entry in entries_of(type(config)):
        value = value_at(config, path)
        if value is not None and section_of(field) is None:
            sets = f"option {entry.option}" if entry.option else f"argument {entry.argument}" if entry.argument else ""
            rows.append([path, str(value), sets if is_set(config, path, field) else ""])
    return rows


COMMAND = Command(
    name="config",
    help="show the effect of a configuration of the engine",
    description=_DESCRIPTION,
    configure=_configure,
    run=_run,
)
