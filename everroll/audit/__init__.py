"""The audit: proves invariants I1, I2, I3 and I6 of a run from what it left behind.

`evidence` names what is read, `sources` and `histories` read it, and `settlement`, `verdicts`, `tokens` and `steps`
judge it; `run` puts them together. The live run is never asked, and nothing is written.
"""
