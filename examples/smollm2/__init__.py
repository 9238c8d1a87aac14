"""A real chat model of 135 million parameters, trained from a GGUF file on sums."""
