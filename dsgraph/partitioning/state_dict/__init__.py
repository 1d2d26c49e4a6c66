"""Full tensors in and out of a partitioned model."""
