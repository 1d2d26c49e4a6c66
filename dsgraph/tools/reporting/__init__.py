"""What was done to a model and what was not: kept while compiling, told by `dsgraph.report`, refused by `strict`."""
