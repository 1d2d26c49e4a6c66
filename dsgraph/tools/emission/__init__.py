"""Kernels for an NVIDIA device that is not there: their source, their cubins, and what they will cost."""
