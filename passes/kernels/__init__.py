"""Kernels in place of what a model spells out: the pass, how it reads captured graphs, and the patterns."""
