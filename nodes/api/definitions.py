"""Routes of model definitions: list, check, create, edit, clone, disable, delete, revisions.

The list includes files of the models folder. A file takes precedence over a stored definition of the same
name, which is then `shadowed`. The origin of a saved text is `editor` for a browser session and `api` for a
key.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

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
from nodes.definitions.rows import SOURCE_PREFIX
from nodes.loading import definition_preview, definition_removal
from nodes.models import DefinitionOrigin
from nodes.registry.listing import FARTHEST
from operations.api.serializers import job_fields, requester_of

_NAME_PARAMETER = OpenApiParameter(
    "name", OpenApiTypes.STR, OpenApiParameter.PATH, description="The model's name; it may contain slashes."
)
_PAGE_NUMBER = query_parameter("page", integer_schema(1, FARTHEST, 1), "The page.")
_LIST = [
    query_parameter("term", TEXT, "Part of the name, backend or model."),
    query_parameter("origin", shapes.ORIGIN_SCHEMA, "Where it comes from."),
    query_parameter("state", shapes.STATE_SCHEMA, "Its state."),
    _PAGE_NUMBER,
    query_parameter(
        "items", integer_schema(1, shapes.MAX_PAGE_SIZE, shapes.DEFAULT_PAGE_SIZE), "Definitions on a page."
    ),
]
_DELETION = [
    _NAME_PARAMETER,
    query_parameter("files", FLAG, "Also delete the files that no other definition names."),
]
_REVISION_PAGE = [
    _NAME_PARAMETER,
    _PAGE_NUMBER,
    query_parameter(
        "items", integer_schema(1, shapes.MAX_REVISIONS, shapes.DEFAULT_REVISIONS), "Revisions on a page."
    ),
]


class _DefinitionRoute(ModelRoute):
    """Base of the views of definitions."""

    def save(self, request: Request, name: str | None, text: str, fields: Mapping[str, Any]) -> Row:
        """Save the text in the name of the caller. Return the definition."""
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
        shapes.DEFINITIONS_SHAPE,
        refused=(400,),
        parameters=_LIST,
    )
    def get(self, request: Request) -> Response:
        """Returns all definitions, of files and stored ones, by name, in a constant number of queries."""
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
        body = shapes.DEFINITIONS_SHAPE.of(
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
        shapes.DETAIL_SHAPE,
        status=201,
        refused=(400, 409, 413),
        body=shapes.DefinitionCreateSerializer,
        sent={"text": shapes.YAML_EXAMPLE, "reason": "for the team"},
        examples=[response_example(shapes.DETAIL_SHAPE.example, "201", "created")],
    )
    def post(self, request: Request) -> Response:
        """Creates a stored definition.

        409 if the model is defined already. A text with a secret is refused.
        """
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
        """Returns the JSON Schema for editors. Settings that it does not list are permitted but not used."""
        return Response(schema.definition_schema())


class DefinitionPreviewView(_DefinitionRoute):
    """`/api/definitions/preview`."""

    @describe(
        "definitions_preview",
        "Check a definition, and show what saving it would do",
        shapes.PREVIEW_SHAPE,
        refused=(400, 413),
        body=shapes.DefinitionPreviewSerializer,
        sent={"name": "m", "changes": {"context_size": 8192}},
    )
    def post(self, request: Request) -> Response:
        """Checks a text without saving it.

        The answer has the errors with line and column, the replicas that would be replaced, and the nodes
        where the model would fit.
        """
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
        in_force = definition_entries.find_definition(name) if name else None
        return Response(
            shapes.PREVIEW_SHAPE.of(**definition_preview.preview(text, checked, name, in_force, former or ""))
        )


class DefinitionView(_DefinitionRoute):
    """`/api/definitions/:name`."""

    @describe(
        "definition",
        "Show a definition",
        shapes.DETAIL_SHAPE,
        refused=(404,),
        parameters=[_NAME_PARAMETER],
    )
    def get(self, request: Request, name: str) -> Response:
        """Returns the definition with its YAML, the values of the form, and its files."""
        return Response(definition_entries.definition_detail(name))

    @describe(
        "definition_save",
        "Change a definition",
        shapes.DETAIL_SHAPE,
        refused=(400, 404, 409, 413),
        body=shapes.DefinitionEditSerializer,
        parameters=[_NAME_PARAMETER],
        sent={"changes": {"context_size": 8192}, "revision": 1, "reason": "longer documents"},
    )
    def put(self, request: Request, name: str) -> Response:
        """Saves a new revision. Replicas of the former revision are then replaced.

        409 with `revision` if the definition has changed since. If a file defines the model, the text is
        stored but `shadowed`: the file stays in force.
        """
        fields = validate_body(shapes.DefinitionEditSerializer, request)
        row, former = store.find(name), _text_of(name)
        text = fields["text"] if "text" in fields else edit.apply_changes(former, fields["changes"])
        # Without a revision of the caller's: a definition that is deleted now would come back.
        read = {"revision": row.revision if row is not None else 0}
        return Response(self.save(request, name, text, read | fields))

    @describe(
        "definition_delete",
        "Delete a stored definition",
        shapes.REMOVAL_SHAPE,
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
        """Unloads the model, then deletes its stored definition.

        409 for a model that only a file defines: remove that file.
        """
        with_files = read_query(request, _DELETION)["files"]
        return Response(remove(request, name, with_files=with_files), status=202)


def remove(request: Request, name: str, *, with_files: bool) -> Row:
    """Request the deletion of the definition, with its files if requested; return the operation."""
    by = requester_of(request)
    admission = definition_removal.request_removal(name, by=by, with_files=with_files, now=clock.now())
    return shapes.REMOVAL_SHAPE.of(**job_fields(admission, "the definition is being deleted"))


class DefinitionCloneView(_DefinitionRoute):
    """`/api/definitions/:name/clone`."""

    @describe(
        "definition_clone",
        "Copy a definition under another name",
        shapes.DETAIL_SHAPE,
        status=201,
        refused=(400, 404, 409, 413),
        body=shapes.DefinitionCloneSerializer,
        parameters=[_NAME_PARAMETER],
        sent={"name": "m-long"},
        examples=[response_example(shapes.DETAIL_SHAPE.example | {"name": "m-long"}, "201", "created")],
    )
    def post(self, request: Request, name: str) -> Response:
        """Copies the definition under another name, with the same files. 409 if that name is defined."""
        fields = validate_body(shapes.DefinitionCloneSerializer, request)
        text = _text_of(name)
        store.require_no_file(fields["name"])
        reason = fields.get("reason") or f"copy of {name}"
        copied = edit.rename(text, fields["name"])
        return Response(self.save(request, None, copied, {"reason": reason}), status=201)


_describe_switch = partial(
    describe, answer=shapes.DETAIL_SHAPE, refused=(404, 409), parameters=[_NAME_PARAMETER]
)


def _set_disabled(name: str, disabled: bool) -> Response:
    """Switch a stored definition: the state of a file is its author's."""
    store.set_disabled(name, disabled, now=clock.now())
    return Response(definition_entries.definition_detail(name))


class DefinitionDisableView(_DefinitionRoute):
    """`/api/definitions/:name/disable`."""

    @_describe_switch(
        "definition_disable",
        "Disable a definition",
        shown=shapes.DETAIL_SHAPE.example | {"state": "disabled"},
    )
    def post(self, request: Request, name: str) -> Response:
        """Disables the definition.

        Requests for the model get 404, and replicas are unloaded after their last request.
        """
        return _set_disabled(name, True)


class DefinitionEnableView(_DefinitionRoute):
    """`/api/definitions/:name/enable`."""

    @_describe_switch("definition_enable", "Enable a definition")
    def post(self, request: Request, name: str) -> Response:
        """Enables the definition; the next request loads the model."""
        return _set_disabled(name, False)


class DefinitionRevisionsView(_DefinitionRoute):
    """`/api/definitions/:name/revisions`."""

    @describe(
        "definition_revisions",
        "List the revisions of a definition",
        shapes.REVISIONS_SHAPE,
        refused=(400, 404),
        parameters=_REVISION_PAGE,
    )
    def get(self, request: Request, name: str) -> Response:
        """Returns the revisions, newest first: author, time, reason and difference.

        A file has no revisions.
        """
        query = read_query(request, _REVISION_PAGE)
        page, items = query["page"], query["items"]
        revisions = store.revisions_of(name)
        total = revisions.count()
        if not total:
            definition_entries.find_entry(name)
        shown = list(revisions[(page - 1) * items : page * items])
        return Response(
            shapes.REVISIONS_SHAPE.of(
                revisions=[
                    shapes.REVISION_SHAPE.of_object(revision, diff=diff)
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
        shapes.DETAIL_SHAPE,
        refused=(400, 404, 409, 413),
        body=shapes.DefinitionRestoreSerializer,
        parameters=[_NAME_PARAMETER, OpenApiParameter("number", OpenApiTypes.INT, OpenApiParameter.PATH)],
        sent={"revision": 3},
    )
    def post(self, request: Request, name: str, number: int) -> Response:
        """Saves the text of this revision as the newest one; 409 with `revision` if it has changed since."""
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
