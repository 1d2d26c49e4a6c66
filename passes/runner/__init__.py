"""Runs passes over graphs, checks what they did, and carries them into code generators."""
