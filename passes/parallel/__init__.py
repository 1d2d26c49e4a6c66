"""Passes that divide the operators of a model among ranks."""
