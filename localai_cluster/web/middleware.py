"""ASGI middleware in front of Django: limits of request bodies, and character sets."""

from typing import Any

from localai_cluster.web.bodies import Budget, too_many_bodies

LARGEST_DJANGO_BODY = 1024 * 1024 + 64 * 1024
"""Bytes of a body that are passed on, above every route's own limit; further bytes are read and dropped."""
FREE_BODY = 64 * 1024
"""Bytes of a body that are always admitted. Django reads a body before it knows the caller."""
MOST_HELD_BY_DJANGO = 64 * 1024 * 1024
"""Memory limit of all larger bodies of one process, in bytes."""


class BoundedBody:
    """ASGI middleware: bounds the memory of each body, and of all larger bodies together.

    Raises Unavailable when the larger bodies exceed their limit.
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self._budget = Budget(MOST_HELD_BY_DJANGO)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on."""
        passed, counted, refused = 0, 0, False

        async def bounded() -> Any:
            nonlocal passed, counted, refused
            message = await receive()
            while (
                passed > LARGEST_DJANGO_BODY
                and message["type"] == "http.request"
                and message.get("more_body")
            ):
                message = await receive()
            if message["type"] == "http.request" and passed > LARGEST_DJANGO_BODY:
                return {**message, "body": b""}
            passed += len(message.get("body", b""))
            if passed > FREE_BODY:
                self._budget.take(passed - counted)
                counted = passed
                refused = self._budget.is_exceeded
                if refused:
                    return {"type": "http.disconnect"}  # Django then closes the received part of the body
            return message

        try:
            await self._application(scope, bounded, send)
            if refused:
                raise too_many_bodies()
        finally:
            self._budget.give_back(counted)


class Utf8Only:
    """ASGI middleware: drops the character set of the content type.

    Django decodes query and form with the character set that a client sends, and a name such as `hex` makes
    it fail before any of our code runs. We accept only UTF-8.
    """

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on."""
        headers = [(name, _plain(name, value)) for name, value in scope["headers"]]
        await self._application({**scope, "headers": headers}, receive, send)


def _plain(name: bytes, value: bytes) -> bytes:
    if name.lower() != b"content-type":
        return value
    kind, *parameters = value.split(b";")
    other_parameters = [part for part in parameters if not part.strip().lower().startswith(b"charset")]
    return b";".join([kind, *other_parameters])
