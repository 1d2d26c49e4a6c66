"""Repeated blocks of a model: each is a graph of its own, which is gathered while others compute."""
