"""Measured costs of devices and links: their records, where they are kept, and what ranks agree on."""
