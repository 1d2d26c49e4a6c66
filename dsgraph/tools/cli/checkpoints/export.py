"""`dsgraph export`: an engine's checkpoint becomes files of Hugging Face."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from dsgraph.tools.cli.command import Answer, Command, CommandError

_DESCRIPTION = """\
Write the weights of an engine's checkpoint as safetensors with an index, and config.json if the model is a transformers
model: `from_pretrained` loads the folder. The weights of one file are in memory at a time."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)(KB|MB|GB)?", text)
    if found is None or int(found[1]) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; it takes a size such as 5GB")
    return int(found[1]) * _UNITS[found[2] or ""]


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of checkpoints, or of one checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder to write; new or empty")
    parser.add_argument("--tag", metavar="TAG", help="name of the checkpoint in the folder (default: the latest)")
    parser.add_argument(
        "--shard", metavar="SIZE", type=_size, default="5GB", help="maximum size of a file (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of floating-point weights (default: as saved)"
    )


def _run(arguments: argparse.Namespace) -> Answer:
    from dsgraph.checkpoint.convert import export_checkpoint
    from dsgraph.checkpoint.weight_files import DTYPES
    from dsgraph.utils.errors import CheckpointError

    out = Path(arguments.out)
    try:
        path = export_checkpoint(
            Path(arguments.checkpoint),
            out,
            tag=arguments.tag,
            shard_bytes=arguments.shard,
            dtype=DTYPES[arguments.dtype] if arguments.dtype else None,
        )
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    files = sorted(file.name for file in out.iterdir())
    return Answer(f"{path} -> {out}: {', '.join(files)}", {"checkpoint": str(path), "out": str(out), "files": files})


COMMAND = Command(
    name="export",
    help="convert an engine's checkpoint to safetensors for transformers",
    description=_DESCRIPTION,
    configure=_configure,
    run=_run,
)
