"""Sessions in the database, looked up only by valid keys.

A cookie can contain an escaped NUL character. PostgreSQL refuses such a text, and every route would respond
with 500.
"""

from typing import Any

from django.contrib.sessions.backends import db
from django.contrib.sessions.backends.base import VALID_KEY_CHARS


class SessionStore(db.SessionStore):
    """Django's session store; the class keeps its name, because Django signs sessions with it."""

    def _validate_session_key(self, key: Any) -> bool:
        """Return True if Django can have generated this key; any other key counts as no session."""
        return bool(super()._validate_session_key(key)) and set(key) <= set(VALID_KEY_CHARS)  # type: ignore[misc]
