"""Where a `memory_limit` can be promised, and what it leaves."""
