"""A tiny two-turn task, its agent, and a tiny model that learns it: what `make demo` runs."""
