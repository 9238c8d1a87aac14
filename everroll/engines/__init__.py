"""Inference engines: what one looks like (`base`), its clients (`sglang`, `open`), and one of our own (`embedded`)."""
