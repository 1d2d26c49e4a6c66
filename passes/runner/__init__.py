"""The runner: it runs passes over graphs, checks them, and passes the graphs to code generators."""
