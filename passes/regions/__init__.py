"""Regions that Dynamo captured: distributed ops are moved out of them, and saved arguments are read outside."""
