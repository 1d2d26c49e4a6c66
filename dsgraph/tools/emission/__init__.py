"""Kernels for an NVIDIA device that this machine does not have: source, cubins and predicted costs."""
