"""Messages to token ids and back, and the training samples made of them. Pure: no I/O, no HTTP."""
