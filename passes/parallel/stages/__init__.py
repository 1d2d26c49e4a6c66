"""Pipeline stages: where a forward is cut, and the graphs of its parts."""
