"""`memory_limit`: when it can be promised, and how much memory it leaves."""
