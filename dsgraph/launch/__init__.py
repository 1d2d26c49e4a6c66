"""Starting of ranks: one launcher for the command line, examples, benchmarks and tests."""
