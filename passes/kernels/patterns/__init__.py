"""How each kernel is recognised in a captured graph: a file each, of the name of its kernel."""
