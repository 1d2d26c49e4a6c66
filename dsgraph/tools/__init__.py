"""Tools that look at compiles and never decide: command line, dumps, reports, bisection, emission, calibration."""
