"""Quantized weights: layers, rounding, calibration and files."""
