"""The trainer is policy optimisation and nothing else."""

from __future__ import annotations

import subprocess
import sys


def test_the_trainer_loads_no_temporal_and_no_http() -> None:
    code = (
        "import sys, trainer.service, trainer.__main__\n"
        "wrong = {'temporalio', 'starlette', 'aiohttp', 'activities', 'workflows', 'worker'} & set(sys.modules)\n"
        "print(sorted(wrong))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
