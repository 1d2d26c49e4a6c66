"""Calibration: `dsgraph calibrate` measures what this machine and its links can do, the cost model uses the figures.

`records` is the file and `store` its place, neither needs torch. `ranks` measures over a process group, with `device`,
`transfers` and `fit`; `worker` does so in processes of its own. `agreed` gives all ranks of a mesh the same figures.
"""
