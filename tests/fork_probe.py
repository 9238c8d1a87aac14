"""What a process finds, said on its standard output: `python -m tests.fork_probe CODE` ends with that exit code."""

import atexit
import json
import os
import random
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    import numpy

    found = {
        "argv": sys.argv[1:],
        "ahead": os.environ.get("EVERROLL_PROBE_LOADED_BY", "") not in ("", str(os.getpid())),
        "cwd": os.getcwd(),
        "path": sys.path[:2],
        "drawn": [random.random(), numpy.random.rand()],
        "leads_group": os.getpgid(0) == os.getpid(),
        "niceness": os.nice(0),
        "name": Path("/proc/self/comm").read_text(),
        "signals": re.findall("Sig(?:Blk|Ign|Cgt):.*", Path("/proc/self/status").read_text()),
        "stdin": sys.stdin.read(),
        "title": Path("/proc/self/cmdline").read_bytes().decode().replace("\0", " ").strip(),
    }
    print(json.dumps(found))
    atexit.register(print, "cleaned up")
    sys.exit(int(sys.argv[1]))

os.environ["EVERROLL_PROBE_LOADED_BY"] = str(os.getpid())
