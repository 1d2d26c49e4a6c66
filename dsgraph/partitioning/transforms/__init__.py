"""Transforms of a parameter around its gather: compression, fake quantization, offload; and tensor-parallel slices."""
