"""What crosses a process boundary: names, ids, run specification, requests and results.

Imports the standard library and pydantic only, so that workflows, clients and tests can load it without torch,
temporalio or a web stack.
"""
