"""What looks at compiles and never decides: command line, dumps, reports, bisection, emission, calibration."""
