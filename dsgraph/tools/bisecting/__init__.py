"""`dsgraph bisect`: run a graph with one more pass each time, and find the node at which results differ."""
