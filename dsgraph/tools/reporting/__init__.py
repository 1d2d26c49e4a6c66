"""Record of what was done to a model and what was not: shown by `dsgraph.report`, refused by `strict`."""
