"""Dumps: `describe` makes records of graphs, `render` text of records, `writer` files of both.

`records` and `render` need no torch, so that the command line does not.
"""
