"""One of several session server processes, as the supervisor starts it: `python -m everroll.sessions.member FD`.

Its settings come as one line of JSON on standard input, where nobody else sees them; the end of standard input says
that the supervisor is gone.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from everroll.logs import configure_logging
from everroll.sessions.server import serve_member
from everroll.sessions.settings import SessionServerSettings


def main() -> None:
    settings = SessionServerSettings.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_supervisor, name="supervisor-watch", daemon=True).start()
    configure_logging("session-server")
    serve_member(settings, socket.socket(fileno=int(sys.argv[1])))


def _end_with_supervisor() -> None:
    """At once, as if killed: whoever starts the next server wants the address."""
    while os.read(0, 1024):  # not `sys.stdin`: a thread that reads it holds a lock that the interpreter needs to end
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
