"""The script in `examples/from_deepspeed/` on both libraries: the same file, the same losses.

    python -m benchmarks.losses --json losses.json

Two ranks, 50 steps of two micro-batches. The two scripts differ in their import. Columns:
    deepspeed, dsgraph   the loss of the first rank's last micro-batch
    early, largest       the largest difference of two losses, in the first six steps and in all

Rows called `rounded` begin with weights that bfloat16 can hold, and add micro-batches up in float32. The last row is
DeepSpeed at stage 2 against DeepSpeed at stage 3: what roundings alone do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Check, Report, Row, add_arguments, machine

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "from_deepspeed"
STEPS = 50
EARLY = 2 * 6  # losses of the first six steps
STAGES, DTYPES = (0, 1, 2, 3), ("fp32", "bf16")
LIMIT = 600  # seconds of a run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 2 where DeepSpeed is not installed, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description="The same losses as DeepSpeed.")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: the extra `peers` has it", file=sys.stderr)
        return 2
    report = Report(machine=machine(["deepspeed"]))
    cases = [(stage, dtype, False) for dtype in DTYPES for stage in STAGES] + [(2, "bf16", True)]
    for stage, dtype, rounded in cases[:1] if options.quick else cases:
        report.rows.append(compare(config(stage, dtype, rounded=rounded), rounded=rounded))
        print(report.rows[-1], flush=True)
    if not options.quick:
        report.rows.append(spread("bf16"))
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    return 0


def config(stage: int, dtype: str, *, rounded: bool = False) -> dict[str, Any]:
    """Return the example's file with another stage and dtype."""
    settings: dict[str, Any] = json.loads((FOLDER / "ds.json").read_text())
    settings["zero_optimization"]["stage"] = stage
    settings["bf16"]["enabled"] = dtype == "bf16"
    if rounded:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return {**settings, "dsgraph": {"codegen": "eager"}}


def script(*, deepspeed: bool, rounded: bool = False) -> str:
    """Return the script, as it stands or as it was written for DeepSpeed.

    `rounded`: with weights that bfloat16 can hold.
    """
    text = (FOLDER / "train.py").read_text()
    if deepspeed:
        text = text.replace("import dsgraph as deepspeed\n", "import deepspeed\n")
    return text.replace("layers=2))", "layers=2)).bfloat16().float()") if rounded else text


def compare(settings: dict[str, Any], *, rounded: bool = False) -> Row:
    """Return both libraries with one file."""
    expected = losses(script(deepspeed=True, rounded=rounded), settings)
    found = losses(script(deepspeed=False, rounded=rounded), settings)
    dtype = "bf16" if settings["bf16"]["enabled"] else "fp32"
    stage = settings["zero_optimization"]["stage"]
    return _row(f"stage {stage}", f"{dtype}, rounded" if rounded else dtype, expected, found)


def spread(dtype: str) -> Row:
    """Return DeepSpeed at stage 2 and at stage 3."""
    second, third = (losses(script(deepspeed=True), config(stage, dtype)) for stage in (2, 3))
    return _row("DeepSpeed's stage 2 and stage 3", dtype, second, third)


def _row(what: str, dtype: str, expected: list[float], found: list[float]) -> Row:
    differences = [abs(mine - other) for mine, other in zip(found, expected, strict=True)]
    return {
        **{"what": what, "dtype": dtype, "first": found[0], "deepspeed": expected[-1], "dsgraph": found[-1]},
        **{"early": max(differences[:EARLY]), "largest": max(differences)},
    }


def losses(text: str, settings: dict[str, Any]) -> list[float]:
    """Return the losses of the first rank's micro-batches on two ranks.

    Args:
        text: The script.
        settings: What stands in its file.

    Raises:
        RuntimeError: The script failed; holds what it printed.
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    # DeepSpeed builds an operator, by ninja of its own environment.
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "train.py"]
    flags = [f"--steps={STEPS}", "--losses=losses.json", "--deepspeed_config=ds.json"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(text)
        (folder / "ds.json").write_text(json.dumps(settings))
        done = subprocess.run(
            [*command, *flags], cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT
        )
        if done.returncode != 0:
            raise RuntimeError(f"{done.stdout}{done.stderr}")
        found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach."""
    stages = [f"stage {stage}" for stage in STAGES]
    return [
        Check(
            f"{dtype}: largest difference of losses over {STEPS} steps",
            max((row["largest"] for row in rows if row["dtype"] == dtype and row["what"] in stages), default=None),
            1e-4,
            "lower",
        )
        for dtype in DTYPES
    ]


if __name__ == "__main__":
    sys.exit(main())
