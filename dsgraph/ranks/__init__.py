"""How ranks agree: they compare what they are about to do, and raise together instead of waiting for each other."""
