"""Passes that distribute a model over ranks: tensor-parallel operators, or pipeline stages."""
