"""Data sets of prompts: where their files are, how rows are read, what identifies them, in which order they are played.

`everroll.prompts` is the front door.
"""
