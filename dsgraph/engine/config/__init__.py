"""The JSON configuration of the engine: its sections, how it is read, and what it sets."""
