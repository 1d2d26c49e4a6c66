"""A plugin of pytest: which test files took longest, at the end of a run, also where several workers share it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import pytest

SHOWN = 10


def seconds_by_file(reports: Iterable[object]) -> Counter[str]:
    """Seconds of setup, call and teardown of the tests of each file, added up over workers."""
    seconds: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    return seconds


class SlowestFiles:
    """Prints the time of a run and its slowest files."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        seconds = seconds_by_file(report for reports in terminalreporter.stats.values() for report in reports)
        if len(seconds) < 2:
            return
        elapsed, total = time.monotonic() - self._started, sum(seconds.values())
        terminalreporter.section(f"{elapsed:.0f} s, {total:.0f} s of workers; slowest files")
        for name, took in seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{took:7.1f} s  {took / total:4.0%}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the summary."""
    config.pluginmanager.register(SlowestFiles(), "slowest-files")
