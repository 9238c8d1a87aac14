"""The audit: proves invariants I1, I2, I3, I6 and the bounds of I5 of a run from what it left behind.

`evidence` names what is read, `sources` and `histories` read it, the others judge it, and `run` puts them together. The
live run is never asked, and nothing is written.
"""
