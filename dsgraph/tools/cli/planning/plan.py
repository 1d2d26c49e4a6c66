"""`dsgraph plan`: the cost of a layout of a model over GPUs, or the fastest layout."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.utils.errors import LayoutError

if TYPE_CHECKING:
    from dsgraph.parallel.planning.layout import RankLayout

_AXES = ("tp", "pp", "dp")

_DESCRIPTION = """\
Predict the memory and the time of training a transformer on a cluster, by formulas and without a GPU: memory of a GPU
by part, bytes that it sends over each axis and link, the bubble of the pipeline, the time of a step and TFLOPS. --tp,
--pp and --dp set the layout; --search tries all layouts and ranks those that fit. --explain prints every formula with
its symbols, its numbers and its source. --compile captures and compiles the layers of one rank on simulated ranks,
without running them, and compares their memory with the formulas. See docs/guides/choose-a-layout.md.
Exit code 1: the layout, or every layout, takes more memory than a GPU has."""


def _run(arguments: argparse.Namespace) -> Answer:
    from dsgraph.parallel.planning.gpus import gpu_of
    from dsgraph.parallel.planning.layout import ModelShape, TrainingSetup, usual_heads
    from dsgraph.parallel.planning.layout_plan import plan
    from dsgraph.parallel.planning.search import search

    from . import plan_text

    layout = _layout(arguments)
    try:
        gpu = gpu_of(arguments.gpu)
        model = ModelShape(
            *(arguments.params, arguments.layers, arguments.hidden, arguments.seq, arguments.vocab),
            heads=arguments.heads or usual_heads(arguments.hidden),
        )
        training = TrainingSetup(
            batch=arguments.batch or arguments.gpus,
            micro_batch=arguments.micro_batch,
            zero_stage=arguments.zero_stage,
            checkpointing=arguments.checkpointing == "on",
        )
        if layout is not None:
            item = plan(model, layout, training, gpu=gpu, gpus=arguments.gpus)
            text = plan_text.plan_text(item, model, training, gpu=gpu, explain=arguments.explain)
            data = plan_text.plan_data(item, explain=arguments.explain)
            if arguments.compile:
                from dsgraph.tools.planning.captured_layout import compare

                from .plan_captured import captured_text

                compared = compare(model, layout, training, gpu=gpu)
                text, data["captured"] = f"{text}\n\n{captured_text(compared)}", asdict(compared)
            return Answer(text, data, code=int(not item.fits))
        found = search(model, training, gpu=gpu, gpus=arguments.gpus)
        text = plan_text.search_text(found, model, training, gpu=gpu, explain=arguments.explain)
        return Answer(text, plan_text.search_data(found, explain=arguments.explain), code=int(not found.fitting))
    except LayoutError as error:
        raise CommandError(str(error)) from None


def _layout(arguments: argparse.Namespace) -> RankLayout | None:
    """Return the layout that was given; None where it is to be searched.

    Raises:
        CommandError: Neither, or both.
    """
    from dsgraph.parallel.planning.layout import RankLayout

    sizes = {axis: getattr(arguments, axis) for axis in _AXES}
    given = [f"--{axis}" for axis, size in sizes.items() if size is not None]
    missing = [f"--{axis}" for axis, size in sizes.items() if size is None]
    if arguments.search and arguments.compile:
        raise CommandError("--compile takes one layout: give --tp, --pp and --dp in place of --search")
    if arguments.search and given:
        raise CommandError(f"--search finds the layout itself: leave {' and '.join(given)} out")
    if arguments.search:
        return None
    if missing:
        raise CommandError(f"{' and '.join(missing)} missing: give --tp, --pp and --dp, or --search")
    return RankLayout(**sizes)


def _count(text: str) -> int:
    from dsgraph.parallel.planning.layout import read_count

    try:
        return read_count(text)
    except LayoutError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _configure(parser: argparse.ArgumentParser) -> None:
    def number(name: str, text: str, **others: Any) -> None:
        parser.add_argument(name, type=_count, metavar="N", help=text, **others)

    number("--params", "number of parameters of the model, such as 1T, 175B or 1.5B", required=True)
    number("--layers", "number of transformer layers", required=True)
    number("--hidden", "width of a layer", required=True)
    number("--seq", "number of tokens of a sequence", required=True)
    number("--vocab", "size of the vocabulary (default: 51200)", default=51200)
    number("--heads", "number of attention heads (default: heads of width 128, or else 64)")
    parser.add_argument(
        "--gpu", required=True, metavar="NAME", help="v100-32gb, a100-40gb, a100-80gb, h100-80gb or h200"
    )
    number("--gpus", "number of GPUs", required=True)
    number("--tp", "tensor-parallel ranks, within a node")
    number("--pp", "pipeline stages, across nodes")
    number("--dp", "data-parallel ranks, across nodes")
    parser.add_argument("--search", action="store_true", help="rank all layouts that fit, by the time of a step")
    parser.add_argument(
        "--zero-stage", type=int, choices=range(4), default=0, help="ZeRO over the data-parallel ranks (default: 0)"
    )
    number("--micro-batch", "sequences of a micro-batch (default: 1)", default=1)
    number("--batch", "sequences of a step over all GPUs (default: one per GPU)")
    parser.add_argument(
        "--checkpointing",
        choices=("on", "off"),
        default="on",
        help="on: save only the input of each layer, and recompute the layer in the backward (default: on)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="capture and compile the layers of one rank, and compare their memory with the formulas (takes seconds)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="print every formula, with symbols, with numbers, and its source"
    )


COMMAND = Command(
    "plan", "predict memory and time of a layout over GPUs, or rank all layouts", _DESCRIPTION, _configure, _run
)
