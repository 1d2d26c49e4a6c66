"""The compute kernels: a file each, in the order formula, reference, Triton, launcher, op, supports."""
