"""Layouts that no machine here could run, captured and compiled all the same."""
