"""Helpers without torch: errors, bytes, files, JSON records, nearest names."""
