from __future__ import annotations

import os

import torch

from dsgraph.engine.monitoring.collective_times import CollectiveTimes
from dsgraph.passes.analysis.quiet import without_library_output


def test_lines_of_libraries_are_dropped_and_others_are_not(capfd):
    with without_library_output():
        os.write(1, b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\nmine\n")
        os.write(2, b"USDT:2026-11-25 23:08:26 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\nWARNING: mine\n")
        print("printed")
    os.write(1, b"after\n")
    assert sorted(capfd.readouterr()[0].split()) == ["after", "mine", "printed"]


def test_watching_collectives_prints_nothing(capfd):
    times = CollectiveTimes(torch.device("cpu"))
    times.begin()
    torch.ones(3).sum()
    times.end()
    assert capfd.readouterr() == ("", "")
