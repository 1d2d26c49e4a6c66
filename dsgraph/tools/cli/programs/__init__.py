"""Commands that run a program or measure a machine."""
