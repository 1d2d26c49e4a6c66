"""`python -m dsgraph`: the command line where the script `dsgraph` is not installed."""

import sys

from dsgraph.cli import main

if __name__ == "__main__":
    sys.exit(main())
