"""Run a program that dies with its parent: `python -I -S launch.py PARENT_PID NICENESS PROGRAM ARGUMENT...`.

The program replaces this process, so it keeps its pid. On Linux the kernel kills it when the supervisor ends, even by
SIGKILL; elsewhere `everroll down` finds what is left by the state file. A program of its own, since code between fork
and exec must not run in a process with threads; it imports nothing but the standard library.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL at the parent's end; exit if the parent has ended already."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise SystemExit("the supervisor has ended")


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    os.nice(int(sys.argv[2]))
    program = sys.argv[3:]
    try:
        os.execvp(program[0], program)
    except OSError as error:
        raise SystemExit(f"cannot run {program[0]}: {error}") from error


if __name__ == "__main__":
    main()
