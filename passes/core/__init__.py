"""What a pass is, the facts that it may use, and the order in which passes stand."""
