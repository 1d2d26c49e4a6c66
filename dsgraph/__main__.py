"""`python -m dsgraph`: the command line where the script `dsgraph` is not installed."""

import sys

from .tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
