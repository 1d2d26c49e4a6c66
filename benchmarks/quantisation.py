"""Held-out losses of a byte-level Llama with weights of 8 and 4 bits, quantized after training or in it (MoQ).

    python -m benchmarks.quantisation --json quantisation.json

It is trained on the text of examples/text.py, with equal steps, seed and batches: without and with
`quantize_training`. Each model trained with it is rounded to 8 bits at the end. The learning rate decays to 0: with a
constant one, MoQ was seen 2 % better and, by another schedule, 1.5 % worse. Columns:
    weights      the weights; "calibrated" with 8 batches of training text; MoQ: first and last bits; "other batches"
                 is the difference between trainings on other parts of the text
    loss         held-out, nats a byte
    over         that loss over the loss of float32 weights
    error        mean over layers: change of the outputs over the outputs, on the batches of calibration
    at_last      steps of MoQ in which all weights had their last bits

It takes three minutes, with one thread. With two, while other programs use the cores, each of the many small ops waits
for the thread that has no core: a step of 0.04 s was seen to take 3 s. Losses do not depend on it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

import dsgraph
from benchmarks.inference import _held_out as held_out
from benchmarks.inference import _llama as llama
from benchmarks.report import Check, Report, Row, add_arguments, machine
from examples.ranks import Place
from examples.text import standard_library

_TIME, _SIZE = 128, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, whatever the figures are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantisation", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Place.join(alone=True)
    report = Report(machine=machine(["transformers"]))
    report.rows = measure(steps=4 if options.quick else 800)
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    return 0


def measure(*, steps: int) -> list[Row]:
    """Return one row a way to get few bits."""
    text = standard_library()
    plain, _ = _trained(text, steps, {})
    other, _ = _trained(text, steps, {}, seed=1)
    data = [text.batch(steps + i, size=_SIZE, time=_TIME, seed=0, rank=0, world=1)[0] for i in range(8)]
    made = {"float32": plain, "float32, other batches": other}
    for bits in (8, 4):
        made[f"{bits} bits, to nearest"] = dsgraph.quantize(copy.deepcopy(plain), bits=bits)
        made[f"{bits} bits, calibrated"] = dsgraph.quantize(copy.deepcopy(plain), bits=bits, data=data)
    at_last = {}
    for name, moq in _moq(steps).items():
        trained, at_last[name] = _trained(text, steps, moq)
        made[name] = dsgraph.quantize(trained, bits=8)
    losses = {name: held_out(model, text) for name, model in made.items()}
    return [
        {
            **{"weights": name, "loss": losses[name], "over": losses[name] / losses["float32"]},
            **{"error": _error(name, made), "at_last": at_last.get(name)},
        }
        for name in made
    ]


def _moq(steps: int) -> dict[str, dict[str, Any]]:
    """Return sections of the configuration.

    A block of the largest eigenvalue waits ten times as long for its second bit.
    """

    def section(start: int, period: int, eigenvalue: bool) -> dict[str, Any]:
        return {
            "enabled": True,
            "quantize_bits": {"start_bits": start, "target_bits": 8},
            "quantize_schedule": {"quantize_period": max(period, 1), "schedule_offset": 0},
            "eigenvalue": {"enabled": eigenvalue},
        }

    return {
        "MoQ 16 to 8": section(16, steps // 256, False),
        "MoQ 10 to 8": section(10, steps // 40, False),
        "MoQ 10 to 8, by eigenvalue": section(10, steps // 40, True),
    }


def _error(name: str, made: dict[str, Any]) -> float | None:
    how = getattr(made.get(name.replace("to nearest", "calibrated")), "quantization", None)
    if how is None or not how.output_errors:
        return None
    errors = how.output_errors_to_nearest if "nearest" in name else how.output_errors
    return statistics.mean(errors.values())


def _trained(text: Any, steps: int, moq: dict[str, Any], *, seed: int = 0) -> tuple[Any, int]:
    """Return a Llama after so many steps, as one process holds it; and in how many of them all weights had 8 bits."""
    model = llama(layers=2, width=128, words=256, positions=_TIME).train()
    config = {
        "train_batch_size": _SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": steps // 20, "cos_min_ratio": 0.0},
        },
        "quantize_training": moq,
        "dsgraph": {"codegen": "eager"},
    }
    engine = dsgraph.initialize(model=model, config=config)[0]
    at_last = 0
    for step in range(steps):
        at_last += bool(moq) and set(engine.quantized_training.bits().values()) == {8}
        tokens, _ = text.batch(step, size=_SIZE, time=_TIME, seed=seed, rank=0, world=1)
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
    plain = llama(layers=2, width=128, words=256, positions=_TIME)
    plain.load_state_dict({name: value.full_tensor() for name, value in engine.module.state_dict().items()})
    engine.close()
    return plain, at_last


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach."""
    over = {row["weights"]: row["over"] for row in rows}
    bounds = {
        **{"8 bits, to nearest": 1.002, "8 bits, calibrated": 1.002, "4 bits, calibrated": 1.03},
        **dict.fromkeys(_moq(0), 1.01),
    }
    return [Check(f"held-out loss: {name}, over float32", over[name], most, "lower") for name, most in bounds.items()]


if __name__ == "__main__":
    sys.exit(main())
