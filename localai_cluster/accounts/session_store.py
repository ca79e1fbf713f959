"""Sessions in the database, found only by keys that could be theirs.

A cookie can carry a NUL character as an escape. PostgreSQL takes no such text, and every route would answer
500 to it.
"""

from typing import Any

from django.contrib.sessions.backends import db
from django.contrib.sessions.backends.base import VALID_KEY_CHARS


class SessionStore(db.SessionStore):
    """Django's; its name stays, because Django signs sessions with it."""

    def _validate_session_key(self, key: Any) -> bool:
        """Whether Django could have made this key; any other one counts as none."""
        return bool(super()._validate_session_key(key)) and set(key) <= set(VALID_KEY_CHARS)  # type: ignore[misc]
