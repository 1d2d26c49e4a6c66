"""What is done to a parameter around its gather: compression, fake quantization, tensor slices, offload."""
