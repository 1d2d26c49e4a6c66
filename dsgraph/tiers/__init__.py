"""Where parts of a model lie that are not in memory: files of fixed places, and parameters in them."""
