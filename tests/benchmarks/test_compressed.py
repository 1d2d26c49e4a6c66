"""`benchmarks.compressed`: what its parts compute from rows."""

from __future__ import annotations

from benchmarks import layer_drop, one_bit


def test_dropped_layers_are_held_against_all_layers():
    rows = [
        {"system": system, "early_s": 1.0, "late_s": late, "mean_s": mean, "loss": loss}
        for system, late, mean, loss in (("all", 1.0, 1.0, 2.0), ("dropped", 0.75, 0.9, 2.03))
    ]
    late, mean = layer_drop.checks(rows)
    assert (late.value, late.ok) == (0.75, True)
    assert (mean.value, mean.ok) == (0.9, False)


def test_one_bit_adam_is_held_against_the_hooks():
    sent = {"ddp": (10.0, 320.0), "ddp-fp16": (5.0, 160.0), "ddp-powersgd": (2.0, 20.0), "1-bit-adam": (3.0, 10.0)}
    links = [{"rate": "100mbit", "system": name, "step_s": s, "link_mb": mb} for name, (s, mb) in sent.items()]
    trained = [{"system": name, "held_out": 2.0} for name in ("adam", "1-bit-adam", "lamb")]
    trained.append({"system": "1-bit-lamb", "held_out": 2.1})
    found = {check.name: check for check in one_bit.checks(links, trained, {"ratio": 4.0})}
    assert found["bytes of a compressed step over fp32's"].value == 1 / 32
    assert found["bytes of a compressed step over fp16's"].value == 1 / 16
    assert found["100mbit: step over DDP's"].ok
    assert not found["100mbit: step over that of ddp-powersgd"].ok
    assert found["held-out loss of 1-bit-adam over adam's"].ok
    assert not found["held-out loss of 1-bit-lamb over lamb's"].ok
    assert not found["compressing on one rank over a plain copy"].ok
