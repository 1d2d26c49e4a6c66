"""Runs the ranks of a script under torchrun.

python -m dsgraph.launch.torchrun COUNT [options of torchrun] -- (SCRIPT | -m MODULE) [arguments]
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run the script under torchrun; the exit code is that of the rank that failed first."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    end = arguments.index("--")
    (count, *options), script = arguments[:end], arguments[end + 1 :]
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # not a line for each rank it ends
    first = 2 if script[0] == "-m" else 1
    wanted = torchrun.get_args_parser().parse_args([f"--nproc-per-node={count}", *options, *script[:first]])
    wanted.training_script_args = list(script[first:])  # past its parser, which would drop a `--`
    try:
        torchrun.run(wanted)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"dsgraph: rank {rank} failed first; it wrote the reason above", file=sys.stderr)
        # A shell's way to say that a signal ended it, where a process cannot end with a negative number.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (SignalException, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
