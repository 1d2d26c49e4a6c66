"""The command line. It reads dumps without torch, which would take longer to load than the rest."""
