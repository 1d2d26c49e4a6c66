"""The optimizers of an engine: LAMB, Muon, 1-bit, and those that need full matrices or are offloaded."""
