"""`dsgraph import`: files of Hugging Face, or a checkpoint of DeepSpeed's, become an engine's checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsgraph.tools.cli.command import Answer, Command, CommandError

_DESCRIPTION = """\
Convert a folder of safetensors, or a ZeRO checkpoint of DeepSpeed (stages 1 to 3), to a checkpoint of the engine.
Masters, optimizer state, schedule, loss scale and counts of a ZeRO checkpoint are converted too. `load_checkpoint` of
the engine resumes from the result on any number of ranks. No pickled code is run: only tensors and plain values are
read."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="folder of safetensors, or of DeepSpeed checkpoints")
    parser.add_argument("out", metavar="OUT", help="folder of checkpoints to write to")
    parser.add_argument("--tag", metavar="TAG", help="name of the new checkpoint (default: global_step<N>)")


def _run(arguments: argparse.Namespace) -> Answer:
    from dsgraph.checkpoint.convert import import_checkpoint
    from dsgraph.utils.errors import CheckpointError

    try:
        path, said = import_checkpoint(Path(arguments.source), Path(arguments.out), tag=arguments.tag)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    lines = [f"{key}: {value}" for key, value in said.items() if value not in ([], None)]
    return Answer("\n".join([f"{arguments.source} -> {path}", *lines]), {"checkpoint": str(path), **said})


COMMAND = Command(
    name="import",
    help="convert safetensors or DeepSpeed's ZeRO checkpoints to an engine's checkpoint",
    description=_DESCRIPTION,
    configure=_configure,
    run=_run,
)
