"""Benchmarks. Each is a program, `python -m benchmarks.NAME --json FILE`, and reports as `benchmarks.report` says."""
