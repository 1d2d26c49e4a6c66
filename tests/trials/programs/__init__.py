"""Random training programs on several ranks, each against one process: `python -m tests.trials.programs`."""
