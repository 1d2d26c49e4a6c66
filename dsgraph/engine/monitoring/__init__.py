"""What an engine reports about its steps: logs, metrics, times, memory, the FLOPS profiler."""
