"""What a model becomes: parameters as shards, their state during a step, and the seam that hands them out."""
