"""ZeRO: markers become collectives, and gathered parameters get their lifetimes; one file a pass."""
