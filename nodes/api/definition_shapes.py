"""Bodies of the routes of model definitions, with their examples in the API document."""

from typing import Any

from rest_framework import serializers

from localai_cluster.kit import names
from localai_cluster.web.rest import NullIsAbsent, Text, Whole
from localai_cluster.web.shapes import BYTES, FLAG, TEXT, TEXTS, TIME, UUID, Shape, count, field
from nodes.api.base import enum_schema
from nodes.api.models import ModelName
from nodes.definitions import store
from nodes.definitions.files import MAX_FILE_BYTES
from nodes.loading.reason_shapes import FIT
from nodes.models import DefinitionOrigin
from operations.api.serializers import JOB_FIELDS

ORIGINS = ("file", *DefinitionOrigin.values)
STATES = ("active", "disabled", "shadowed", "unusable")
ORIGIN_SCHEMA, STATE_SCHEMA = enum_schema(ORIGINS), enum_schema(STATES)
_REVISION_SCHEMA = count(0)
MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE = 1000, 100
MAX_REVISIONS, DEFAULT_REVISIONS = 50, 20
"""Maximum and default number of revisions on a page. Each revision has its diff."""
YAML_EXAMPLE = "name: m\nbackend: llama-cpp\nparameters:\n  model: m.gguf\ncontext_size: 8192\n"
MOMENT_EXAMPLE = "2026-11-28T09:15:04.120394Z"

SUMMARY_SHAPE = Shape(
    "DefinitionSummary",
    "A model that a file or a stored definition defines.",
    [
        field("name", TEXT, example="m"),
        field("backend", TEXT, "Empty if the definition cannot be used.", example="llama-cpp"),
        field("model", TEXT, "The file or repository that the engine loads.", example="m.gguf"),
        field("origin", ORIGIN_SCHEMA, example="editor"),
        field(
            "state", STATE_SCHEMA, "`shadowed`: a stored definition over which a file wins.", example="active"
        ),
        field("revision", _REVISION_SCHEMA, "Of the stored definition; 0 without one.", example=2),
        field("size", BYTES, "Bytes of the files that are there.", example=4831838208),
        field("context_size", count(0), example=8192, nullable=True),
        field("use_cases", TEXTS, example=["chat", "completion", "tokenize"]),
        field("updated_at", TIME, example=MOMENT_EXAMPLE),
        field("actor", TEXT, "The user who saved it; empty for a file.", example="ann"),
        field("problem", TEXT, "Why it cannot be used.", example=""),
    ],
)
UNUSABLE_SHAPE = Shape(
    "UnusableDefinition",
    "A definition that cannot be used.",
    [
        field("file", TEXT, "The file; empty for a stored definition.", example="b.yaml"),
        field("name", TEXT, "The model that it means to define, if that is known.", example="b"),
        field("line", count(0), "0: not known.", example=3),
        field("column", count(0), "0: not known.", example=1),
        field("error", TEXT, example="is not valid YAML"),
    ],
)
DEFINITIONS_SHAPE = Shape(
    "Definitions",
    "A page of the definitions, by name.",
    [
        field("definitions", SUMMARY_SHAPE.many),
        field("total", count(), "How many match on all pages.", example=1),
        field("page", count(1), example=1),
        field("items", count(1), example=DEFAULT_PAGE_SIZE),
        field("unusable", UNUSABLE_SHAPE.many),
    ],
)
FORM_SHAPE = Shape(
    "DefinitionForm",
    "The settings that most people change; null: the definition leaves it to others.",
    [
        field("context_size", count(0), example=8192, nullable=True),
        field("parallel", count(1), "Requests that an engine answers at once.", example=None, nullable=True),
        field(
            "gpu_layers", {"oneOf": [{"type": "integer"}, enum_schema(["auto"])]}, example=None, nullable=True
        ),
        field("template", TEXT, "A Jinja template for chats; empty: the model's own.", example=""),
        field("options", TEXTS, example=[]),
        field("max_tokens", {"type": "integer"}, example=None, nullable=True),
    ],
)
MODEL_FILE_SHAPE = Shape(
    "DefinitionFile",
    "A file that the definition names, by its path in the models folder.",
    [
        field("path", TEXT, example="m.gguf"),
        field("size", BYTES, example=4831838208),
        field("present", FLAG, "It is on the control plane.", example=True),
        field(
            "source",
            TEXT,
            "The address from which nodes get it if it is not; empty: it is missing.",
            example="",
        ),
    ],
)
DETAIL_SHAPE = Shape(
    "Definition",
    "A definition with its text.",
    [
        field("name", TEXT, example="m"),
        field("text", TEXT, "YAML of the stored definition, of the file without one.", example=YAML_EXAMPLE),
        field("origin", ORIGIN_SCHEMA, example="editor"),
        field("state", STATE_SCHEMA, example="active"),
        field(
            "shadowed",
            FLAG,
            "A file defines the model: a stored definition is kept and not used.",
            example=False,
        ),
        field("file", TEXT, "The file that defines the model; empty without one.", example=""),
        field("revision", _REVISION_SCHEMA, example=2),
        field("form", FORM_SHAPE.ref, nullable=True),
        field("size", BYTES, example=4831838208),
        field("files", MODEL_FILE_SHAPE.many),
        field("updated_at", TIME, example=MOMENT_EXAMPLE),
        field("actor", TEXT, example="ann"),
        field("warnings", TEXTS, example=[]),
        field("error", TEXT, example=""),
    ],
)
TEXT_PROBLEM_SHAPE = Shape(
    "DefinitionProblem",
    "What is wrong with a text, and where; line and column count from 1, 0: not known.",
    [field("line", count(0)), field("column", count(0)), field("path", TEXT), field("message", TEXT)],
)
REPLACED_REPLICA_SHAPE = Shape(
    "ReplacedReplica",
    "A replica that renewal replaces.",
    [field("node_id", UUID), field("node_name", TEXT), field("replica_index", count())],
)
PREVIEW_SHAPE = Shape(
    "DefinitionCheck",
    "What saving would do.",
    [
        field("valid", FLAG, example=True),
        field("errors", TEXT_PROBLEM_SHAPE.many, example=[]),
        field("warnings", TEXTS, example=[]),
        field("text", TEXT, example=YAML_EXAMPLE),
        field("form", FORM_SHAPE.ref, nullable=True),
        field("revision_changes", FLAG, "Engines would load with other options.", example=True),
        field("replicas", REPLACED_REPLICA_SHAPE.many, example=[]),
        field("fit", FIT.ref, example=None, nullable=True),
        field("diff", TEXT, "Unified, against the text in force.", example=""),
    ],
)
REVISION_SHAPE = Shape(
    "DefinitionRevision",
    "A text that the definition has had, as its difference from the one before.",
    [
        field("number", count(1), example=1),
        field("actor", TEXT, example="ann"),
        field("at", TIME, example=MOMENT_EXAMPLE),
        field("reason", TEXT, example="for the team"),
        field("origin", enum_schema(DefinitionOrigin.values), example="editor"),
        field("diff", TEXT, example="--- revision 0\n+++ revision 1\n"),
    ],
)
REVISIONS_SHAPE = Shape(
    "DefinitionRevisions",
    "A page of the revisions, the newest first.",
    [
        field("revisions", REVISION_SHAPE.many),
        field("total", count(), example=1),
        field("page", count(1), example=1),
        field("items", count(1), example=DEFAULT_REVISIONS),
    ],
)
REMOVAL_SHAPE = Shape(
    "DefinitionRemoval",
    "The operation that deletes the definition.",
    [*JOB_FIELDS, field("deduplicated", FLAG)],
)


class _ReasonSerializer(NullIsAbsent):
    reason = Text(max_length=store.MAX_REASON_LENGTH, required=False)

    def validate_reason(self, reason: str | None) -> str | None:
        names.check_text(reason or "", "reason")
        return reason


class DefinitionCreateSerializer(_ReasonSerializer):
    """The text of a new definition; `name` replaces the model's name in the text."""

    text = Text(max_length=MAX_FILE_BYTES)
    name = ModelName(required=False)


class DefinitionEditSerializer(_ReasonSerializer):
    """A new text or changed values of the form, and the revision that the caller has seen."""

    text = Text(max_length=MAX_FILE_BYTES, required=False)
    changes = serializers.DictField(required=False, help_text="Values of the form; null removes a setting.")
    revision = Whole(min_value=0, max_value=2**31 - 1, required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if ("text" in attrs) is ("changes" in attrs):
            raise serializers.ValidationError({"text": ["give a text or changes"]})
        return attrs


class DefinitionPreviewSerializer(DefinitionCreateSerializer, DefinitionEditSerializer):
    """A text, optionally with the model's name, or a model's name with changed values of the form."""

    text = Text(max_length=MAX_FILE_BYTES, required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs = super().validate(attrs)
        if "changes" in attrs and "name" not in attrs:
            raise serializers.ValidationError({"name": ["is required with changes"]})
        return attrs


class DefinitionCloneSerializer(_ReasonSerializer):
    """The model's name in the copy."""

    name = ModelName()


class DefinitionRestoreSerializer(NullIsAbsent):
    """The revision of the definition that the caller has seen."""

    revision = Whole(min_value=0, max_value=2**31 - 1, required=False)
