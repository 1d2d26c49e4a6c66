"""Logs, metrics, times, memory and FLOPS profile of an engine's steps."""
