"""The engine's optimizer: its configuration section, its parameters, its offload, and when it steps."""
