"""Storage of parts of a model outside memory: files of fixed slots, parameters in them, their sizes."""
