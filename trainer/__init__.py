"""Policy optimisation in torch: stored batches in, checkpoints and weights out.

Entry points: `trainer.service.Trainer` for a worker, `python -m trainer` for a stored batch by itself.
Knows neither Temporal nor HTTP; needs nothing but a run directory and a store.
"""
