"""Errors on the wire: the reference's envelopes (`contract/http-api.md` §0.4), chosen by the view.

A view with `envelope = "flat"` gets `{"error": "…"}`; otherwise errors are nested, `{"error": {code, message,
type}}`, with the view's `error_type` (`node_error` on node routes). 401 and 403 are always nested, except for
a worker whose token or secret is wrong (`flat_auth`). Every error response is JSON.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.db import IntegrityError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, JsonResponse
from django.urls import register_converter
from django.urls.converters import StringConverter
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import APIView, set_rollback

from localai_cluster.kit import disk, errors, names, outage
from localai_cluster.web.wire import MALFORMED_MESSAGE, refusal_headers

log = logging.getLogger(__name__)

Body = dict[str, Any]


class TextConverter(StringConverter):
    """A text at the end of an address: any characters.

    Django's `path` matches no line break, so such a name would get the error body of an unknown route.
    """

    regex = "(?s:.+)"


register_converter(TextConverter, "text")


class FlatView(APIView):
    """Base of REST views whose errors are in the flat envelope."""

    envelope = "flat"


def nested_error(code: int | str, message: str, kind: str = "", field: str | None = None) -> Body:
    """Return the nested error envelope; `field` is the wrong field of the request, if any."""
    return {"error": {"code": code, "message": message, "type": kind} | ({"field": field} if field else {})}


def flat_error(message: str, field: str | None = None) -> Body:
    """Return the flat error envelope; `field` is the wrong field of the body, if any."""
    return {"error": message} | ({"field": field} if field else {})


def flat_refusal(error: errors.ClusterError) -> Body:
    """Return the body of a 401 for a worker, in the flat envelope. `rotate` requests a new secret."""
    return flat_error(error.message) | ({"rotate": True} if error.data.get("rotate") else {})


def field_message(detail: Any, path: str = "") -> str:
    """Return the first message of a DRF validation error, prefixed with the path of its field."""
    if isinstance(detail, Mapping):
        key, value = next(iter(detail.items()))
        inner = path if key == "non_field_errors" else f"{path}.{key}" if path else str(key)
        return field_message(value, inner)
    if isinstance(detail, list):
        return field_message(next((item for item in detail if item), detail[0]), path)
    return f"{path}: {detail}" if path else str(detail)


def exception_handler(exc: Exception, context: Mapping[str, Any]) -> Response | None:
    """Return the response for an exception in a view (DRF's hook). For None, Django responds with 500."""
    error = translate_error(exc)
    if error is None:
        return None
    set_rollback()
    view = context.get("view")
    response = Response(body_of(error, view), status=error.status, headers=refusal_headers(error))
    if error.status == 429 or (error.status == 401 and getattr(view, "flat_auth", False)):
        # Django would log a line for each guess; `throttle` logs one a minute.
        setattr(response, "_has_been_logged", True)  # noqa: B010 - Django's mark, unknown to the stubs
    return response


def translate_error(exc: Exception) -> errors.ClusterError | None:
    """Return the ClusterError for an exception in a view, None for an unexpected exception."""
    if isinstance(exc, errors.ClusterError):
        return exc
    if isinstance(exc, exceptions.APIException):
        return _translate_drf_error(exc)
    if isinstance(exc, IntegrityError):
        # Two callers wrote rows that exclude each other, in a case that the code does not handle.
        log.exception("a constraint refused a write")
        return errors.Conflict("changed by another request at the same time; try again")
    if outage.is_disk_full(exc):
        return errors.Unavailable("the database cannot write: its disk is full")
    if outage.is_outage(exc):
        return errors.Unavailable(disk.with_disk_full_hint("the database is unavailable"))
    return next((make() for kind, make in _ERROR_FACTORY_BY_TYPE if isinstance(exc, kind)), None)


def _translate_drf_error(exc: exceptions.APIException) -> errors.ClusterError:
    if isinstance(exc, exceptions.ValidationError):
        # It may quote a key of the body, whose unprintable characters cannot be sent back.
        return errors.InvalidInput(
            names.to_single_line(field_message(exc.detail)), field=_first_field(exc.detail)
        )
    if isinstance(exc, exceptions.UnsupportedMediaType | exceptions.ParseError):
        return errors.InvalidInput(MALFORMED_MESSAGE)
    return _make_error(exc.status_code, str(exc.detail))


_ERROR_FACTORY_BY_TYPE: tuple[tuple[type[Exception], Callable[[], errors.ClusterError]], ...] = (
    (Http404, errors.NotFound),
    (PermissionDenied, errors.Forbidden),
    (RequestDataTooBig, lambda: _make_error(413, "the request body is too large")),
    (SuspiciousOperation, errors.InvalidInput),
    (OperationalError, lambda: errors.Unavailable(disk.with_disk_full_hint("the database is unavailable"))),
    (InterfaceError, lambda: errors.Unavailable(disk.with_disk_full_hint("the database is unavailable"))),
)


def _first_field(detail: Any) -> str | None:
    """Return the field that `field_message` names, None if the error concerns the whole body."""
    key = next(iter(detail), None) if isinstance(detail, Mapping) else None
    return None if key in (None, "non_field_errors") else names.to_single_line(str(key))


def _make_error(status: int, message: str) -> errors.ClusterError:
    error = errors.ClusterError(message)
    error.status = status
    return error


def envelope_of(error: errors.ClusterError, kind: str = "") -> Body:
    """Return the nested error envelope for an error."""
    return nested_error(error.status, error.message, kind)


def body_of(error: errors.ClusterError, view: Any) -> Body:
    """Return the body of an error response in the envelope that the view declares."""
    is_auth_error = error.status in (401, 403)
    if getattr(view, "flat_auth", False) and error.status == 401 and not error.data.get("nested"):
        return flat_refusal(error)
    if is_auth_error and not getattr(view, "flat_auth", False):
        # A page must distinguish this error from others with the same status: its code is a word (§0.4).
        code = error.code if error.code_on_wire else error.status
        return nested_error(code, error.message, _ERROR_TYPE_BY_STATUS[error.status])
    if getattr(view, "envelope", "nested") == "flat":
        return flat_error(error.message, error.field) | {
            key: error.data[key] for key in _FLAT_KEYS if key in error.data
        }
    body = nested_error(error.status, error.message, getattr(view, "error_type", ""), error.field)
    if refusals := error.data.get("refusals"):
        body["error"]["refusals"] = refusals
    return body


_FLAT_KEYS = ("code", "meta_alternative", "last_replicas", "revision", "line", "column", "refusals")
"""Keys of an error's data that the flat envelope contains."""
_ERROR_TYPE_BY_STATUS = {401: "invalid_request_error", 403: "authorization_error"}


def not_found(request: HttpRequest, exception: Exception) -> JsonResponse:
    """Return a 404 in the nested envelope (Django's `handler404`)."""
    return JsonResponse(nested_error(404, "resource not found"), status=404)


def bad_request(request: HttpRequest, exception: Exception) -> JsonResponse:
    """Return a 400 in the nested envelope (Django's `handler400`)."""
    return JsonResponse(nested_error(400, "bad request"), status=400)


def server_error(request: HttpRequest) -> JsonResponse:
    """Return a 500 in the nested envelope (Django's `handler500`). The log has the cause by request id."""
    return JsonResponse(nested_error(500, "internal error"), status=500)
