"""Several processes that train one run: rank 0 decides and writes, all others do as it says."""
