"""Where parts of a model are stored outside memory: files of fixed slots, parameters in them, their sizes."""
