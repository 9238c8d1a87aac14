"""Keys of the session server: one admin key, and one key per session that opens this session's chat and nothing else.

A session's key is derived from the admin key, the session's id and the attempt that opened it, so that it needs no
storage, survives restarts, never has to pass through Temporal's history, and tells an agent that was given up for dead
from the one that took over.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from functools import lru_cache

from everroll.failures import ConfigurationError

ADMIN_KEY_VARIABLE = "EVERROLL_ADMIN_KEY"
_LOCAL_ADMIN_KEY = "everroll-local"
"""Used by server and clients alike when none is set; a server then listens on loopback only."""
_SESSION_KEY_CHARS = 40
_SESSION_KEY = re.compile(r"^es-(\d{1,18})-[0-9a-f]{40}$")


def load_admin_key() -> str:
    """The admin key from the environment, or the well-known one of local stacks."""
    return os.environ.get(ADMIN_KEY_VARIABLE) or _LOCAL_ADMIN_KEY


def check_bind(host: str, admin_key: str) -> None:
    """Raises ConfigurationError for an address others can reach while the admin key is the well-known one."""
    if admin_key == _LOCAL_ADMIN_KEY and not _is_loopback(host):
        raise ConfigurationError(
            f"the session server must not listen on {host} without a key of its own: set {ADMIN_KEY_VARIABLE}, "
            "for the server and for the workers"
        )


@lru_cache(maxsize=16384)
def derive_session_key(admin_key: str, session_id: str, attempt: int) -> str:
    text = f"session:{attempt}:{session_id}"
    digest = hmac.new(admin_key.encode(), text.encode(), hashlib.sha256).hexdigest()
    return f"es-{attempt}-{digest[:_SESSION_KEY_CHARS]}"


def read_attempt(key: str) -> int | None:
    """The attempt that a session's key claims to be of; None if it is no such key."""
    match = _SESSION_KEY.match(key)
    return int(match[1]) if match else None


def is_key(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
