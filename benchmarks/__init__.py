"""Benchmarks. `zero` is a program, `python -m benchmarks.zero --json FILE`; the rest is what it is made of."""
