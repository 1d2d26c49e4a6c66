"""Runs a program for `dsgraph emit`: `python -m dsgraph.tools.emission.program RANKS until [-m] SCRIPT [arguments]`.

As one of RANKS ranks of which the others do not exist, until "step", its first optimizer step, or "end".
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from .harness import fake_ranks


class StepDone(SystemExit):
    """The program has made its first optimizer step: forward and backward were compiled."""

    def __init__(self) -> None:
        super().__init__(0)


@contextmanager
def ends_after_a_step() -> Iterator[None]:
    """End at the first optimizer step, which raises `StepDone`."""

    def stop(*_: Any) -> None:
        raise StepDone

    hook = register_optimizer_step_post_hook(stop)
    try:
        yield
    except StepDone:
        pass
    finally:
        hook.remove()


def main(arguments: Sequence[str]) -> None:
    """Run the script in this process, as `python [-m] SCRIPT` would."""
    world, until, *script = arguments
    with fake_ranks(int(world)), ends_after_a_step() if until == "step" else nullcontext():
        if script[0] == "-m":
            sys.argv = script[1:]
            runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = script
            sys.path[0] = str(Path(script[0]).resolve().parent)
            runpy.run_path(str(Path(script[0]).absolute()), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
