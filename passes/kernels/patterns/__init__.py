"""Recognition of each kernel in a captured graph: one file each, with the name of its kernel."""
