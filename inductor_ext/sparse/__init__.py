"""Block-sparse attention: layouts as data, the op, and how it is computed."""
