"""Chaos: a small run on real processes, which are killed, frozen and cut off from each other while it trains.

`machine` holds the namespaces that all happens in, `links`, `node`, `disks` and `clock` what can break besides
processes; `ancestor` starts stacks as forks, `stack` is one of them, with its `children`; `world` makes the run and
looks at it; `moments`, `blows` and `outages` say when and what, `plan` deals them from a seed, `rounds` plays one run
under them, `judges` say what must be true of it afterwards, and `tally` counts.
"""
