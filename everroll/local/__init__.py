"""The local stack: a Temporal server, a session server, an engine and workers as child processes of one supervisor.

`stack` says which processes, `supervisor` keeps them running, `state` is the file through which other commands find
them, `control` stops and detaches a stack.
"""
