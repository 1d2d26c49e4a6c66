"""What outlives a graph between two optimizer steps: gathered copies, accumulated gradients."""
