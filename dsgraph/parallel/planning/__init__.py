"""What a layout of tensor, pipeline and data parallelism takes, by formulas. Without torch."""
