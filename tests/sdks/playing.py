"""What the scripts of the Python clients have in common: where the server is, and how parts are played.

A script is `python SCRIPT`, with the server in `SDK_URL` and the key in `SDK_KEY`; it prints the parts that
passed, and ends with 1 and a traceback at the first that did not. The models `m` and `cold` are defined, and
only `m` is loaded. This file runs in the installation of the clients and imports nothing of the product.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

URL, KEY = os.environ["SDK_URL"], os.environ["SDK_KEY"]
ASK = "Where is it sunny?"
BREAK = "Break off."
"""Makes the engine fail after a few words."""
FAIL = "Fail."
"""Makes it fail before the first one."""
SAID = "Hello you, how are you?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
    "additionalProperties": False,
}
CITY = {"name": "Rome", "people": 3}
"""What the engine answers where a schema binds it."""
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
CALLED = {"city": "Rome"}
"""What it calls the only tool with, `weather`."""


def play(*parts: Callable[[], None]) -> None:
    """Plays the parts in order."""
    for part in parts:
        part()
        print(f"{part.__name__}: passed", flush=True)


def raises(kind: type[Exception], work: Callable[[], Any]) -> Any:
    """The exception, which must be of exactly this class."""
    try:
        work()
    except Exception as error:
        if type(error) is not kind:
            raise
        return error
    sys.exit(f"{kind.__name__} was not raised")
