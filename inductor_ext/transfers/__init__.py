"""Ops that move tensors out of the device's memory and back."""
