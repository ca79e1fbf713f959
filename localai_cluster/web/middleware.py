"""What HTTP requests meet before Django reads them."""

from typing import Any

from localai_cluster.web.bodies import Budget, too_many

LARGEST_BODY = 1024 * 1024 + 64 * 1024
"""Bytes passed on of a request's body, above every route's own limit; the rest is read and dropped."""
FREE_BODY = 64 * 1024
"""Bytes of a body that are always admitted. Django reads a body before it knows the caller."""
MOST_HELD = 64 * 1024 * 1024
"""Bytes that larger bodies hold together in one process."""


class BoundedBody:
    """ASGI middleware: bounds what Django keeps of each body, and of all larger ones together.

    Raises Unavailable when the larger ones hold too much.
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self._budget = Budget(MOST_HELD)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on."""
        passed, taken, refused = 0, 0, False

        async def bounded() -> Any:
            nonlocal passed, taken, refused
            message = await receive()
            while passed > LARGEST_BODY and message["type"] == "http.request" and message.get("more_body"):
                message = await receive()
            if message["type"] == "http.request" and passed > LARGEST_BODY:
                return {**message, "body": b""}
            passed += len(message.get("body", b""))
            if passed > FREE_BODY:
                self._budget.take(passed - taken)
                taken = passed
                refused = self._budget.is_exceeded
                if refused:
                    return {"type": "http.disconnect"}  # Django then closes what it has of the body
            return message

        try:
            await self._application(scope, bounded, send)
            if refused:
                raise too_many()
        finally:
            self._budget.give_back(taken)


class Utf8Only:
    """ASGI middleware: drops what a content type says of character sets.

    Django decodes query and form by the one a client names, and a name such as `hex` makes it fail before any
    of our code runs. Everything here is UTF-8.
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
    kept = [part for part in parameters if not part.strip().lower().startswith(b"charset")]
    return b";".join([kind, *kept])
