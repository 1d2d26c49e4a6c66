"""Reading and writing FX graphs."""
