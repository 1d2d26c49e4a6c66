"""Kernels for decoding: attention over a cache, skinny matmuls (small batch); on a CPU in C++."""
