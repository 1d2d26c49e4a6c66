"""What a model becomes: its parameters as shards on a mesh, and the seam that hands them out."""
