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

SUMMARY_SHAPE = Shape(
    "DefinitionSummary",
    "A model that a file or a stored definition defines.",
    [
        field("name", TEXT),
        field("backend", TEXT, "Empty if the definition cannot be used."),
        field("model", TEXT, "The file or repository that the engine loads."),
        field("origin", ORIGIN_SCHEMA),
        field("state", STATE_SCHEMA, "`shadowed`: a stored definition over which a file wins."),
        field("revision", _REVISION_SCHEMA, "Of the stored definition; 0 without one."),
        field("size", BYTES, "Bytes of the files that are there."),
        field("context_size", count(0), nullable=True),
        field("use_cases", TEXTS),
        field("updated_at", TIME),
        field("actor", TEXT, "The user who saved it; empty for a file."),
        field("problem", TEXT, "Why it cannot be used."),
    ],
)
UNUSABLE_SHAPE = Shape(
    "UnusableDefinition",
    "A definition that cannot be used.",
    [
        field("file", TEXT, "The file; empty for a stored definition."),
        field("name", TEXT, "The model that it means to define, if that is known."),
        field("line", count(0), "0: not known."),
        field("column", count(0), "0: not known."),
        field("error", TEXT),
    ],
)
DEFINITIONS_SHAPE = Shape(
    "Definitions",
    "A page of the definitions, by name.",
    [
        field("definitions", SUMMARY_SHAPE.many),
        field("total", count(), "How many match on all pages."),
        field("page", count(1)),
        field("items", count(1)),
        field("unusable", UNUSABLE_SHAPE.many),
    ],
)
FORM_SHAPE = Shape(
    "DefinitionForm",
    "The settings that most people change; null: the definition leaves it to others.",
    [
        field("context_size", count(0), nullable=True),
        field("parallel", count(1), "Requests that an engine answers at once.", nullable=True),
        field("gpu_layers", {"oneOf": [{"type": "integer"}, enum_schema(["auto"])]}, nullable=True),
        field("template", TEXT, "A Jinja template for chats; empty: the model's own."),
        field("options", TEXTS),
        field("max_tokens", {"type": "integer"}, nullable=True),
    ],
)
MODEL_FILE_SHAPE = Shape(
    "DefinitionFile",
    "A file that the definition names, by its path in the models folder.",
    [
        field("path", TEXT),
        field("size", BYTES),
        field("present", FLAG, "It is on the control plane."),
        field("source", TEXT, "The address from which nodes get it if it is not; empty: it is missing."),
    ],
)
DETAIL_SHAPE = Shape(
    "Definition",
    "A definition with its text.",
    [
        field("name", TEXT),
        field("text", TEXT, "YAML of the stored definition, of the file without one."),
        field("origin", ORIGIN_SCHEMA),
        field("state", STATE_SCHEMA),
        field("shadowed", FLAG, "A file defines the model: a stored definition is kept and not used."),
        field("file", TEXT, "The file that defines the model; empty without one."),
        field("revision", _REVISION_SCHEMA),
        field("form", FORM_SHAPE.ref, nullable=True),
        field("size", BYTES),
        field("files", MODEL_FILE_SHAPE.many),
        field("updated_at", TIME),
        field("actor", TEXT),
        field("warnings", TEXTS),
        field("error", TEXT),
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
        field("valid", FLAG),
        field("errors", TEXT_PROBLEM_SHAPE.many),
        field("warnings", TEXTS),
        field("text", TEXT),
        field("form", FORM_SHAPE.ref, nullable=True),
        field("revision_changes", FLAG, "Engines would load with other options."),
        field("replicas", REPLACED_REPLICA_SHAPE.many),
        field("fit", FIT.ref, nullable=True),
        field("diff", TEXT, "Unified, against the text in force."),
    ],
)
REVISION_SHAPE = Shape(
    "DefinitionRevision",
    "A text that the definition has had, as its difference from the one before.",
    [
        field("number", count(1)),
        field("actor", TEXT),
        field("at", TIME),
        field("reason", TEXT),
        field("origin", enum_schema(DefinitionOrigin.values)),
        field("diff", TEXT),
    ],
)
REVISIONS_SHAPE = Shape(
    "DefinitionRevisions",
    "A page of the revisions, the newest first.",
    [
        field("revisions", REVISION_SHAPE.many),
        field("total", count()),
        field("page", count(1)),
        field("items", count(1)),
    ],
)
REMOVAL_SHAPE = Shape(
    "DefinitionRemoval",
    "The operation that deletes the definition.",
    [*JOB_FIELDS, field("deduplicated", FLAG)],
)
YAML_EXAMPLE = "name: m\nbackend: llama-cpp\nparameters:\n  model: m.gguf\ncontext_size: 8192\n"
MOMENT_EXAMPLE = "2026-11-28T09:15:04.120394Z"
FORM_EXAMPLE: dict[str, Any] = {
    "context_size": 8192,
    "parallel": None,
    "gpu_layers": None,
    "template": "",
    "options": [],
}
FORM_EXAMPLE |= {"max_tokens": None}
DETAIL_EXAMPLE = {
    "name": "m",
    "text": YAML_EXAMPLE,
    "origin": "editor",
    "state": "active",
    "shadowed": False,
    "file": "",
    "revision": 2,
    "form": FORM_EXAMPLE,
    "size": 4831838208,
    "files": [{"path": "m.gguf", "size": 4831838208, "present": True, "source": ""}],
    "updated_at": MOMENT_EXAMPLE,
    "actor": "ann",
    "warnings": [],
    "error": "",
}
SUMMARY_EXAMPLE = {
    **{
        name: DETAIL_EXAMPLE[name]
        for name in ("name", "origin", "state", "revision", "size", "updated_at", "actor")
    },
    "backend": "llama-cpp",
    "model": "m.gguf",
    "context_size": 8192,
    "use_cases": ["chat", "completion", "tokenize"],
    "problem": "",
}


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
