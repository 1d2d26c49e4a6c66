"""The pass that substitutes kernels for sequences of ops: how it reads captured graphs, and the patterns."""
