"""Runs a host's ranks until they end, or until the process that started them has ended.

    python -m dsgraph.launch.on_host COUNT [options of torchrun] -- (SCRIPT | -m MODULE) [arguments]

Its standard input is the leash: it is only read to notice its end. ssh closes it on the remote host when ssh ends here,
and a pipe closes when its other process dies, however it dies. So no rank outlives `dsgraph launch`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from dsgraph.utils.errors import LaunchError

from .script import find_script, run_under_torchrun


def main(arguments: Sequence[str]) -> int:
    """Run the ranks; the exit code is that of the one that failed first, 2 if there is no such script."""
    end = arguments.index("--")
    (count, *options), rest = arguments[:end], arguments[end + 1 :]
    try:
        is_module = rest[0] == "-m"
        script = find_script(None, rest[1]) if is_module else find_script(rest[0], None)
    except LaunchError as error:
        print(f"dsgraph: {error}", file=sys.stderr)
        return 2
    threading.Thread(target=_end_with_input, daemon=True).start()
    return run_under_torchrun(
        script,
        rest[2 if is_module else 1 :],
        nproc=int(count),
        options=options,
        environment={},
        stdin=subprocess.DEVNULL,
    )


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
