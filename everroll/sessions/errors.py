"""Errors of the session server, one class per answer.

    SessionError             status  can a retry help?
      BadRequestError        400     no: the request is malformed or asks for what is not supported
        PromptRefusedError   400     no: an engine refused it (the prompt is too long, for one)
      UnauthorizedError      401     no
      UnknownSessionError    404     no
      UnknownModelError      404     no: only the run's model is served
      SlowBodyError          408     yes: the request's body did not arrive in time
      ConflictError          409     no: contradicts what is recorded (a length end, other sampling values)
      ReleasedSessionError   410     no: the session was released, or its samples were collected to be trained
      BodyTooLargeError      413     no
      NotOwnerError          421     yes: another session server holds the session; `peers` asks that one
      AssemblyError          422     no: samples cannot be assembled
      TokenInvariantError    500     no: a bug in Everroll or in a chat renderer
      JournalError           503     yes: the journal is away; nothing was answered
        StorageFullError     507     once there is room: the journal has reached its limit, or its disk is full
      UnexpectedError        500     no: any other exception, a bug
      EngineFailureError             no engine gave a usable answer
        BrokenAnswerError    502     maybe: the engine's answer is malformed; nothing was recorded
        EngineAwayError      503     yes: every engine is away or aborted the call; nothing was recorded

`everroll.sessions.app` maps them onto answers, in one handler.
"""

from __future__ import annotations

from typing import ClassVar


class SessionError(Exception):
    """Base of all; the text is for the caller to read."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"


class BadRequestError(SessionError):
    status = 400
    kind = "invalid_request_error"


class PromptRefusedError(BadRequestError):
    """An engine refused the request itself: the prompt is too long for the model, for one."""

    def __init__(self, message: str, engine_url: str) -> None:
        super().__init__(message)
        self.engine_url = engine_url


class UnauthorizedError(SessionError):
    status = 401
    kind = "authentication_error"


class UnknownSessionError(SessionError):
    status = 404
    kind = "unknown_session"


class UnknownModelError(SessionError):
    status = 404
    kind = "unknown_model"


class SlowBodyError(SessionError):
    status = 408
    kind = "slow_body"


class ConflictError(SessionError):
    status = 409
    kind = "conflict"


class ReleasedSessionError(SessionError):
    status = 410
    kind = "released_session"


class BodyTooLargeError(SessionError):
    status = 413
    kind = "body_too_large"


class AssemblyError(SessionError):
    status = 422
    kind = "assembly_error"


class TokenInvariantError(SessionError):
    status = 500
    kind = "token_invariant"


class NotOwnerError(SessionError):
    """Another session server holds the session, or has taken it over meanwhile."""

    status = 421
    kind = "not_owner"


class JournalError(SessionError):
    status = 503
    kind = "journal_error"


class StorageFullError(JournalError):
    status = 507
    kind = "storage_full"


class UnexpectedError(SessionError):
    status = 500
    kind = "unexpected_error"


class EngineFailureError(SessionError):
    """No engine gave a usable answer: whatever the agent makes of that is no verdict on the model."""

    def __init__(self, message: str, engine_url: str | None = None) -> None:
        super().__init__(message)
        self.engine_url = engine_url


class BrokenAnswerError(EngineFailureError):
    status = 502
    kind = "broken_engine_answer"


class EngineAwayError(EngineFailureError):
    status = 503
    kind = "engine_away"
