"""Chaos: a small run on real processes, which are killed, frozen and cut off from each other while it trains.

`links` lie between the processes, `stack` starts and kills them, `world` makes the run and looks at it, `moments` and
`blows` say when and what, `plan` draws them from a seed, `rounds` plays one run under them and judges it.
"""
