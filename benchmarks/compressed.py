"""Training that computes or sends less: dropped layers, and momentum that is sent as signs.

    python -m benchmarks.compressed --json compressed.json
    python -m benchmarks.compressed --parts links,losses,copy --json one-bit.json --plot loss.svg

Parts, and their columns:
    layers  see `benchmarks.layer_drop`
    links   DDP, its hooks, ZeRO-0 and 1-bit Adam after its warm-up, one rank on each of two hosts, at 100 Mbit/s and
            1 Gbit/s: the GPT and the columns of `benchmarks.links`, which needs root
    losses  a byte-level GPT of 4 blocks on the text of examples/text.py, over a link of 100 Mbit/s, 300 steps of equal
            learning rates; 15 % of them are the warm-up: `held_out` in nats a byte, `step_s` the median step
    copy    one rank's gradient of `mb`, compressed and uncompressed, beside a plain copy of it
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import layer_drop, one_bit
from benchmarks.namespaces import LinkError, require_hosts
from benchmarks.report import Report, Row, add_arguments, machine
from dsgraph.launch.processes import ended_by_signals

PARTS = ("layers", "links", "losses", "copy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code.

    Returns:
        0, whatever the figures are; 1 when a system failed; 2 when two hosts cannot be made here.
    """
    options = _parse(arguments)
    report, errors = Report(machine=machine()), list[str]()
    links, trained, copied = list[Row](), list[Row](), None
    try:
        if {"links", "losses"} & set(options.parts):
            require_hosts()
        with ended_by_signals():
            if "layers" in options.parts:
                report.rows += layer_drop.measure(quick=options.quick)
                report.checks += layer_drop.checks(report.rows)
            if "links" in options.parts:
                links, errors = one_bit.over_links(quick=options.quick)
            if "losses" in options.parts:
                trained, more = one_bit.losses(quick=options.quick)
                errors += more
            if "copy" in options.parts:
                copied = one_bit.copying()
    except LinkError as error:
        print(f"benchmarks.compressed: {error}", file=sys.stderr)
        return 2
    report.rows += [*links, *trained, *([copied] if copied is not None else [])]
    report.checks += one_bit.checks(links, trained, copied)
    report.print([{key: value for key, value in row.items() if not isinstance(value, list)} for row in report.rows])
    report.write(options.json)
    if options.plot is not None:
        one_bit.draw(trained, options.plot)
    for text in errors:
        print(f"\nFAILED {text}", file=sys.stderr)
    return 1 if errors else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compressed", description=(__doc__ or "").partition("\n")[0]
    )
    add_arguments(parser)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated; default {','.join(PARTS)}")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses over steps and over seconds")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts: there is no {unknown[0]!r}; there are {', '.join(PARTS)}")
    if options.plot is not None and "losses" not in options.parts:
        parser.error("--plot draws losses: add them to --parts")
    return options


if __name__ == "__main__":
    sys.exit(main())
