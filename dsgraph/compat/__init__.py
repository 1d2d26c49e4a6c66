"""Private torch APIs that the product uses, by area.

Written for torch 2.11 to 2.15; `torch_version.py` says what happens with other versions.
"""
