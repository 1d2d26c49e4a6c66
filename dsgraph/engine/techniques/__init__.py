"""Training techniques of the configuration: quantization-aware training and layer dropping."""
