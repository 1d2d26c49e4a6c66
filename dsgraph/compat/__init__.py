"""Private torch APIs that the product uses, by area.

Checked on torch 2.11.0, 2.12.1 and 2.13.0.
"""
