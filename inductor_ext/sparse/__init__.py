"""Block-sparse attention: layouts as data, the op, and its algorithms."""
