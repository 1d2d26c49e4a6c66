"""The cost of a layout of tensor, pipeline and data parallelism, by formulas. Without torch."""
