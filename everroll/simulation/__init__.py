"""A simulated engine and agent of given latencies, to size a deployment without GPUs (docs/sizing.md).

Everything between them is real: session servers, workers, Temporal, collection and the store.
"""
