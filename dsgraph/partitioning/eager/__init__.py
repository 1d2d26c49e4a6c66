"""Full parameters in code that is not compiled."""
