"""What is larger than memory: tiers below it, and the optimizer that runs over them."""
