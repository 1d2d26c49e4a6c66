"""Held-out losses of a byte-level Llama whose weights get 8 and 4 bits, behind training or in it (MoQ).

    python -m benchmarks.quantisation --json quantisation.json

It is trained on the text of examples/text.py, twice, with equal steps: as ever, and with `quantize_training` from 16 to
8 bits. Columns:
    weights      of what; "calibrated" with 8 batches of training text
    loss         held-out, nats a byte
    over         that loss over the loss of float32 weights
    error        mean over layers: change of the outputs over the outputs, on the batches of calibration
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import dsgraph
from benchmarks.inference import _held_out as held_out
from benchmarks.inference import _llama as llama
from benchmarks.report import Check, Report, Row, add_arguments, machine
from examples.ranks import Place
from examples.text import standard_library

_TIME, _SIZE = 128, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, whatever the figures are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantisation", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    Place.join(alone=True)
    report = Report(machine=machine(["transformers"]))
    report.rows = measure(steps=4 if options.quick else 160)
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    return 0


def measure(*, steps: int) -> list[Row]:
    """One row a way to get few bits."""
    text = standard_library()
    plain = _trained(text, steps, {})
    data = [text.batch(steps + i, size=_SIZE, time=_TIME, seed=0, rank=0, world=1)[0] for i in range(8)]
    made = {"float32": plain}
    for bits in (8, 4):
        made[f"{bits} bits, to nearest"] = dsgraph.quantize(copy.deepcopy(plain), bits=bits)
        made[f"{bits} bits, calibrated"] = dsgraph.quantize(copy.deepcopy(plain), bits=bits, data=data)
    schedule = {"quantize_period": max(steps // 256, 1), "schedule_offset": 0}
    moq = {"enabled": True, "quantize_bits": {"start_bits": 16, "target_bits": 8}, "quantize_schedule": schedule}
    made["8 bits, MoQ"] = dsgraph.quantize(_trained(text, steps, moq), bits=8)
    losses = {name: held_out(model, text) for name, model in made.items()}
    return [
        {
            **{"weights": name, "loss": losses[name], "over": losses[name] / losses["float32"]},
            "error": _error(name, made),
        }
        for name in made
    ]


def _error(name: str, made: dict[str, Any]) -> float | None:
    how = getattr(made.get(name.replace("to nearest", "calibrated")), "quantization", None)
    if how is None or not how.output_errors:
        return None
    errors = how.output_errors_to_nearest if "nearest" in name else how.output_errors
    return statistics.mean(errors.values())


def _trained(text: Any, steps: int, moq: dict[str, Any]) -> Any:
    """A Llama behind so many steps, as one process holds it."""
    model = llama(layers=2, width=128, words=256, positions=_TIME).train()
    config = {
        "train_batch_size": _SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "quantize_training": moq,
        "dsgraph": {"codegen": "eager"},
    }
    engine = dsgraph.initialize(model=model, config=config)[0]
    for step in range(steps):
        tokens, _ = text.batch(step, size=_SIZE, time=_TIME, seed=0, rank=0, world=1)
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
    plain = llama(layers=2, width=128, words=256, positions=_TIME)
    plain.load_state_dict({name: value.full_tensor() for name, value in engine.module.state_dict().items()})
    engine.close()
    return plain


def checks(rows: Sequence[Row]) -> list[Check]:
    """The figures to reach."""
    over = {row["weights"]: row["over"] for row in rows}
    return [
        Check("held-out loss: 8 bits, to nearest, over float32", over["8 bits, to nearest"], 1.002, "lower"),
        Check("held-out loss: 8 bits, calibrated, over float32", over["8 bits, calibrated"], 1.002, "lower"),
        Check("held-out loss: 4 bits, calibrated, over float32", over["4 bits, calibrated"], 1.03, "lower"),
        Check("held-out loss: MoQ 8 bits over training without", over["8 bits, MoQ"], 1.01, "lower"),
    ]


if __name__ == "__main__":
    sys.exit(main())
