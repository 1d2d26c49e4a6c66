"""A script written for DeepSpeed, and its JSON file."""
