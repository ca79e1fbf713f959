"""Routes of model definitions: list, check, create, edit, clone, disable, delete, revisions.

The list includes files of the models folder. A file takes precedence over a stored definition of the same
name, which is then `shadowed`. The origin of a save is `editor` for a browser session and `api` for a key.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.accounts import principals
from localai_cluster.accounts.authentication import principal
from localai_cluster.kit import clock, errors
from localai_cluster.web.openapi import describe, response_example
from localai_cluster.web.rest import validate_body
from localai_cluster.web.shapes import FLAG, TEXT, Row
from nodes.api import definition_entries
from nodes.api import definition_shapes as shapes
from nodes.api.base import ModelRoute, integer_schema, job_example, query_parameter, read_query
from nodes.definitions import edit, schema, store
from nodes.definitions.folder import folder
from nodes.definitions.rows import SOURCE_PREFIX
from nodes.loading import definition_preview, definition_removal
from nodes.loading.definition_removal import RemovalRequest
from nodes.models import DefinitionOrigin
from nodes.registry.listing import FARTHEST
from operations.api.serializers import job_fields, requester_of

MAX_ITEMS, DEFAULT_ITEMS = 1000, 100
MAX_REVISIONS, DEFAULT_REVISIONS = 50, 20
"""Maximum and default number of revisions on a page. Each revision has its diff."""
_MODEL = OpenApiParameter(
    "name", OpenApiTypes.STR, OpenApiParameter.PATH, description="The model's name; it may contain slashes."
)
_PAGE_NUMBER = query_parameter("page", integer_schema(1, FARTHEST, 1), "The page.")
_LIST = [
    query_parameter("term", TEXT, "Part of the name, backend or model."),
    query_parameter("origin", shapes.ORIGIN, "Where it comes from."),
    query_parameter("state", shapes.STATE, "Its state."),
    _PAGE_NUMBER,
    query_parameter("items", integer_schema(1, MAX_ITEMS, DEFAULT_ITEMS), "Definitions on a page."),
]
_DELETION = [
    _MODEL,
    query_parameter("files", FLAG, "Also delete the files that no other definition names."),
]
_REVISION_PAGE = [
    _MODEL,
    _PAGE_NUMBER,
    query_parameter("items", integer_schema(1, MAX_REVISIONS, DEFAULT_REVISIONS), "Revisions on a page."),
]


class _DefinitionRoute(ModelRoute):
    """A route of definitions."""

    def save(self, request: Request, name: str | None, text: str, fields: Mapping[str, Any]) -> Row:
        """Save the text with the caller as its actor. Return the definition."""
        row = store.save(
            name,
            text,
            origin=_origin(request),
            actor=principal(request).name,
            reason=fields.get("reason", ""),
            expected_revision=fields.get("revision"),
            now=clock.now(),
        )
        return definition_entries.definition_detail(row.name)


def _origin(request: Request) -> DefinitionOrigin:
    """Return the origin of a saved text: `editor` for a browser session, `api` for a key."""
    has_key = bool(principals.offered_credential(request.headers))
    return DefinitionOrigin.API if has_key else DefinitionOrigin.EDITOR


def _text_of(name: str) -> str:
    """Return the text in force; raise NotFound."""
    text = store.text_in_force(name)
    if text is None:
        raise errors.NotFound("there is no such definition")
    return text


class DefinitionsView(_DefinitionRoute):
    """`/api/definitions`."""

    @describe(
        "definitions",
        "List model definitions",
        shapes.DEFINITIONS,
        refused=(400,),
        parameters=_LIST,
        shown={
            "definitions": [shapes.SUMMARY_EXAMPLE],
            "total": 1,
            "page": 1,
            "items": DEFAULT_ITEMS,
            "unusable": [
                {"file": "b.yaml", "name": "b", "line": 3, "column": 1, "error": "is not valid YAML"}
            ],
        },
    )
    def get(self, request: Request) -> Response:
        """Those of files and stored ones, by name, in a constant number of queries."""
        query = read_query(request, _LIST)
        term, page, items = query["term"].casefold(), query["page"], query["items"]
        entries = [
            entry
            for entry in definition_entries.read_entries()
            if query["origin"] in ("", entry.origin)
            and query["state"] in ("", entry.state)
            and (not term or entry.contains(term))
        ]
        shown = entries[(page - 1) * items : page * items]
        body = shapes.DEFINITIONS.of(
            definitions=definition_entries.summaries_of(shown),
            total=len(entries),
            page=page,
            items=items,
            unusable=definition_entries.read_unusable_rows(),
        )
        return Response(body)

    @describe(
        "definitions_create",
        "Store a model definition",
        shapes.DETAIL,
        status=201,
        refused=(400, 409, 413),
        body=shapes.DefinitionCreateSerializer,
        sent={"text": shapes.YAML_EXAMPLE, "reason": "for the team"},
        examples=[response_example(shapes.DETAIL_EXAMPLE, "201", "created")],
    )
    def post(self, request: Request) -> Response:
        """409 if the model is defined already. Secrets are refused."""
        fields = validate_body(shapes.DefinitionCreateSerializer, request)
        text = fields["text"]
        if name := fields.get("name"):
            text = edit.rename(text, name)
        checked = schema.require_usable(text, SOURCE_PREFIX).definition
        assert checked is not None
        store.require_no_file(checked.name)
        return Response(self.save(request, None, text, fields), status=201)


class DefinitionSchemaView(_DefinitionRoute):
    """`/api/definitions/schema`."""

    @describe(
        "definitions_schema",
        "Show the JSON Schema of a definition",
        {"type": "object", "additionalProperties": True},
        shown={"title": "Model definition", "type": "object"},
    )
    def get(self, request: Request) -> Response:
        """For editors; settings that it does not list are permitted and not used."""
        return Response(schema.definition_schema())


class DefinitionPreviewView(_DefinitionRoute):
    """`/api/definitions/preview`."""

    @describe(
        "definitions_preview",
        "Check a definition, and show what saving it would do",
        shapes.PREVIEW,
        refused=(400, 413),
        body=shapes.DefinitionPreviewSerializer,
        sent={"name": "m", "changes": {"context_size": 8192}},
        shown={
            "valid": True,
            "errors": [],
            "warnings": [],
            "text": shapes.YAML_EXAMPLE,
            "form": shapes.FORM_EXAMPLE,
            "revision_changes": True,
            "replicas": [],
            "fit": None,
            "diff": "",
        },
    )
    def post(self, request: Request) -> Response:
        """Errors with line and column, the replicas that renewal replaces, where it fits; saves nothing."""
        fields = validate_body(shapes.DefinitionPreviewSerializer, request)
        name = fields.get("name", "")
        former = store.text_in_force(name) if name else None
        text = (
            fields["text"] if "text" in fields else definition_preview.changed_text(former, fields["changes"])
        )
        checked = schema.check_text(text, SOURCE_PREFIX)
        if not name and checked.definition is not None:
            name = checked.definition.name
            former = store.text_in_force(name)
        in_force = async_to_sync(folder().find)(name) if name else None
        return Response(
            shapes.PREVIEW.of(**definition_preview.preview(text, checked, name, in_force, former or ""))
        )


class DefinitionView(_DefinitionRoute):
    """`/api/definitions/:name`."""

    @describe(
        "definition",
        "Show a definition",
        shapes.DETAIL,
        refused=(404,),
        parameters=[_MODEL],
        shown=shapes.DETAIL_EXAMPLE,
    )
    def get(self, request: Request, name: str) -> Response:
        """With its YAML, the values of the form, and its files."""
        return Response(definition_entries.definition_detail(name))

    @describe(
        "definition_save",
        "Change a definition",
        shapes.DETAIL,
        refused=(400, 404, 409, 413),
        body=shapes.DefinitionEditSerializer,
        parameters=[_MODEL],
        sent={"changes": {"context_size": 8192}, "revision": 1, "reason": "longer documents"},
        shown=shapes.DETAIL_EXAMPLE,
    )
    def put(self, request: Request, name: str) -> Response:
        """Adds a revision; renewal then replaces the replicas of the former one.

        409 with `revision` if it has moved since. Of a model that a file defines the text is stored, and
        `shadowed` says that the file stays in force.
        """
        fields = validate_body(shapes.DefinitionEditSerializer, request)
        former = _text_of(name)
        text = fields["text"] if "text" in fields else edit.apply_changes(former, fields["changes"])
        return Response(self.save(request, name, text, fields))

    @describe(
        "definition_delete",
        "Delete a stored definition",
        shapes.REMOVAL,
        status=202,
        meaning="The operation is recorded.",
        refused=(400, 404, 409),
        parameters=_DELETION,
        examples=[
            response_example(
                job_example("the definition is being deleted") | {"deduplicated": False}, "202", "accepted"
            )
        ],
    )
    def delete(self, request: Request, name: str) -> Response:
        """Unloads the model first. 409 for a model that only a file defines: remove that file."""
        with_files = read_query(request, _DELETION)["files"]
        return Response(remove(request, name, with_files=with_files), status=202)


def remove(request: Request, name: str, *, with_files: bool) -> Row:
    """Request the deletion; return its operation."""
    removal = RemovalRequest(name, requester_of(request), with_files)
    admission = definition_removal.request_removal(removal, now=clock.now())
    return shapes.REMOVAL.of(**job_fields(admission, "the definition is being deleted"))


class DefinitionCloneView(_DefinitionRoute):
    """`/api/definitions/:name/clone`."""

    @describe(
        "definition_clone",
        "Copy a definition under another name",
        shapes.DETAIL,
        status=201,
        refused=(400, 404, 409, 413),
        body=shapes.DefinitionCloneSerializer,
        parameters=[_MODEL],
        sent={"name": "m-long"},
        examples=[response_example(shapes.DETAIL_EXAMPLE | {"name": "m-long"}, "201", "created")],
    )
    def post(self, request: Request, name: str) -> Response:
        """The files are the same. 409 if the new name is defined already."""
        fields = validate_body(shapes.DefinitionCloneSerializer, request)
        text = _text_of(name)
        store.require_no_file(fields["name"])
        reason = fields.get("reason") or f"copy of {name}"
        copied = edit.rename(text, fields["name"])
        return Response(self.save(request, None, copied, {"reason": reason}), status=201)


_describe_switch = partial(describe, answer=shapes.DETAIL, refused=(404, 409), parameters=[_MODEL])


def _set_disabled(name: str, disabled: bool) -> Response:
    """Switch a stored definition: the state of a file is its author's."""
    store.set_disabled(name, disabled, now=clock.now())
    return Response(definition_entries.definition_detail(name))


class DefinitionDisableView(_DefinitionRoute):
    """`/api/definitions/:name/disable`."""

    @_describe_switch(
        "definition_disable", "Disable a definition", shown=shapes.DETAIL_EXAMPLE | {"state": "disabled"}
    )
    def post(self, request: Request, name: str) -> Response:
        """Requests for the model get 404 from then on; its replicas are unloaded after their last request."""
        return _set_disabled(name, True)


class DefinitionEnableView(_DefinitionRoute):
    """`/api/definitions/:name/enable`."""

    @_describe_switch("definition_enable", "Enable a definition", shown=shapes.DETAIL_EXAMPLE)
    def post(self, request: Request, name: str) -> Response:
        """The next request loads the model."""
        return _set_disabled(name, False)


class DefinitionRevisionsView(_DefinitionRoute):
    """`/api/definitions/:name/revisions`."""

    @describe(
        "definition_revisions",
        "List the revisions of a definition",
        shapes.REVISIONS,
        refused=(400, 404),
        parameters=_REVISION_PAGE,
        shown={
            "revisions": [
                {
                    "number": 1,
                    "actor": "ann",
                    "at": shapes.MOMENT_EXAMPLE,
                    "reason": "for the team",
                    "origin": "editor",
                    "diff": "--- revision 0\n+++ revision 1\n",
                }
            ],
            "total": 1,
            "page": 1,
            "items": DEFAULT_REVISIONS,
        },
    )
    def get(self, request: Request, name: str) -> Response:
        """Who changed what, when and why, the newest first; none for a model that a file defines."""
        query = read_query(request, _REVISION_PAGE)
        page, items = query["page"], query["items"]
        revisions = store.revisions_of(name)
        total = revisions.count()
        if not total:
            definition_entries.find_entry(name)
        shown = list(revisions[(page - 1) * items : page * items])
        return Response(
            shapes.REVISIONS.of(
                revisions=[
                    shapes.REVISION.of_object(revision, diff=diff)
                    for revision, diff in zip(shown, store.diffs(shown), strict=True)
                ],
                total=total,
                page=page,
                items=items,
            )
        )


class DefinitionRestoreView(_DefinitionRoute):
    """`/api/definitions/:name/revisions/:number/restore`."""

    @describe(
        "definition_restore",
        "Restore a revision of a definition",
        shapes.DETAIL,
        refused=(400, 404, 409, 413),
        body=shapes.DefinitionRestoreSerializer,
        parameters=[_MODEL, OpenApiParameter("number", OpenApiTypes.INT, OpenApiParameter.PATH)],
        sent={"revision": 3},
        shown=shapes.DETAIL_EXAMPLE,
    )
    def post(self, request: Request, name: str, number: int) -> Response:
        """Its text becomes the newest revision; 409 with `revision` if the definition has changed since."""
        fields = validate_body(shapes.DefinitionRestoreSerializer, request) if request.data else {}
        store.restore(
            name,
            number,
            actor=principal(request).name,
            origin=_origin(request),
            expected_revision=fields.get("revision"),
            now=clock.now(),
        )
        return Response(definition_entries.definition_detail(name))
