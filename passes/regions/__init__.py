"""Regions that Dynamo captured: distributed ops are hoisted, and saved arguments are read outside."""
