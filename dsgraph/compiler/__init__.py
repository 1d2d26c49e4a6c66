"""The backend: a graph in, a compiled graph out, with capture facts, options and code generators."""
