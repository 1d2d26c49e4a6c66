"""Commands that read a dump."""
