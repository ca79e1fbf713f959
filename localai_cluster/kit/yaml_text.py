"""Untrusted YAML: every problem of a text raises one kind of error, with the line of the value.

PyYAML's constructors let Python's own errors through: an impossible date is a ValueError, `!!bool maybe` a
KeyError, `!!int ""` an IndexError. A caller that catches only `YAMLError` would fail on more than that text.
"""

from typing import Any

import yaml

LONGEST_REASON = 400
"""Longest message in characters: it quotes the text, which may be megabytes."""


class InvalidYAML(ValueError):
    """The text is not valid YAML; the message is one line that can be encoded."""


class LocatedErrors:
    """Mixin for loaders: an error of a value is a YAMLError that names its line."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct one node; YAMLError for a value that Python cannot hold."""
        try:
            return super().construct_object(node, deep)  # type: ignore[misc]
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            reason = f"not a value of {str(node.tag).rpartition(':')[2]}: {error}"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from error


def load(text: str | bytes, loader: Any) -> Any:
    """Return the document that the loader constructs from the text; raise InvalidYAML for any error."""
    try:
        return yaml.load(text, Loader=loader)
    except RecursionError as error:
        raise InvalidYAML("is nested too deeply") from error
    except Exception as error:
        raise InvalidYAML(f"is not valid YAML: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Return the error's text, or its type, on one line, cut, without characters that cannot be encoded."""

    text = str(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        text = f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    text = " ".join((text or type(error).__name__).split())
    if len(text) > LONGEST_REASON:
        text = f"{text[: LONGEST_REASON // 2]} … {text[-LONGEST_REASON // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()
