"""`dsgraph bisect`: runs a graph with ever more of its passes, and finds the node at which results part."""
