"""The base class of passes, the facts that they may use, and their order."""
