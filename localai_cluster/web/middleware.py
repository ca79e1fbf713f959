"""What HTTP requests meet before Django reads them."""

from typing import Any

LARGEST_BODY = 8 * 1024 * 1024
"""Bytes passed on of a request's body, above every route's own limit; the rest is read and dropped."""


class BoundedBody:
    """ASGI middleware: keeps a huge body off the disk, to which Django would write all of it."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes the request on."""
        passed = 0

        async def bounded() -> Any:
            nonlocal passed
            message = await receive()
            while passed > LARGEST_BODY and message["type"] == "http.request" and message.get("more_body"):
                message = await receive()
            if message["type"] == "http.request" and passed > LARGEST_BODY:
                return {**message, "body": b""}
            passed += len(message.get("body", b""))
            return message

        await self._application(scope, bounded, send)


class Utf8Only:
    """ASGI middleware: drops what a content type says of character sets.

    Django decodes query and form by the one a client names, and a name such as `hex` makes it fail before any
    of our code runs. Everything here is UTF-8.
    """

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes the request on."""
        headers = [(name, _plain(name, value)) for name, value in scope["headers"]]
        await self._application({**scope, "headers": headers}, receive, send)


def _plain(name: bytes, value: bytes) -> bytes:
    if name.lower() != b"content-type":
        return value
    kind, *parameters = value.split(b";")
    kept = [part for part in parameters if not part.strip().lower().startswith(b"charset")]
    return b";".join([kind, *kept])
