"""Capture and compilation of layouts that no machine here could run."""
