"""OpenAPI descriptions of the routes for audio and images."""

from localai_cluster.web.bodies import FORM_TYPE as FORM
from localai_cluster.web.openapi import Operation, schema_of
from nodes.dialects.audio_speech import KINDS, SpeechBody
from nodes.dialects.audio_transcriptions import MANY, TranscriptionBody
from nodes.dialects.images import ImagesBody

_TEXT: Operation = {"type": "string"}
_BYTES: Operation = {"type": "string", "format": "binary"}
_SOUND = {kind.decode(): {"schema": _BYTES} for kind in (*KINDS.values(), b"application/octet-stream")}
_TRANSCRIPT: Operation = {
    "type": "object",
    "required": ["text"],
    "properties": {
        "text": _TEXT,
        "task": _TEXT,
        "language": _TEXT,
        "duration": {"type": "number"},
        "segments": {"type": "array", "items": {"type": "object"}},
        "words": {"type": "array", "items": {"type": "object"}},
    },
    "description": "All but `text` is of `verbose_json`.",
}
_IMAGES: Operation = {
    "type": "object",
    "required": ["id", "created", "data"],
    "properties": {
        "id": _TEXT,
        "created": {"type": "integer"},
        "data": {
            "type": "array",
            "items": {"type": "object", "required": ["b64_json"], "properties": {"b64_json": _TEXT}},
        },
    },
}
UNPROVED = "Tried with scripted engines only, so far with no real one."
"""Part of each description: the examples have no engine for audio or images."""
_SPEAK = (
    "The engine's sound as it is: nothing is converted. With `stream` it is sent while it is made; what fails"
    " after the first byte ends the connection. " + UNPROVED
)
_TRANSCRIBE = (
    "The file is read by the model's engine. With `stream`, server-sent events: pieces, then all of the text,"
    " then `data: [DONE]`. " + UNPROVED
)


def _form() -> Operation:
    schema = schema_of(TranscriptionBody)
    properties = dict(schema["properties"])
    properties[MANY + "[]"] = properties.pop(MANY)
    return {**schema, "required": ["file", "model"], "properties": {"file": _BYTES, **properties}}


def routes(
    security: list[dict[str, list[str]]], refusals: dict[str, Operation]
) -> dict[str, dict[str, Operation]]:
    """Return the operations of all these routes, with and without the `/v1` prefix, by path and method."""

    def operation(
        name: str, summary: str, description: str, body: dict[str, Operation], answer: dict[str, Operation]
    ) -> dict[str, Operation]:
        content: Operation = {
            "operationId": name,
            "tags": ["inference"],
            "summary": summary,
            "description": description,
            "security": security,
            "requestBody": {"required": True, "content": body},
            "responses": {"200": {"description": "The answer.", "content": answer}, **refusals},
        }
        return {"POST": content}

    transcript: dict[str, Operation] = {
        "application/json": {"schema": _TRANSCRIPT},
        **{kind: {"schema": _TEXT} for kind in ("text/plain", "application/x-subrip", "text/vtt")},
        "text/event-stream": {"schema": _TEXT},
    }
    speech: dict[str, Operation] = {"application/json": {"schema": schema_of(SpeechBody)}}
    images: dict[str, Operation] = {"application/json": {"schema": schema_of(ImagesBody)}}
    operations = {"/tts": operation("speak", "Say a text", _SPEAK, speech, _SOUND)}
    for prefix, suffix in (("/v1", ""), ("", "_without_prefix")):
        operations |= {
            f"{prefix}/audio/transcriptions": operation(
                "transcribe" + suffix,
                "Write down speech",
                _TRANSCRIBE,
                {FORM: {"schema": _form()}},
                transcript,
            ),
            f"{prefix}/audio/speech": operation(
                "create_speech" + suffix, "Say a text as OpenAI's clients ask", _SPEAK, speech, _SOUND
            ),
            f"{prefix}/images/generations": operation(
                "create_images" + suffix,
                "Make images",
                f"One after the other, each with the next seed. {UNPROVED}",
                images,
                {"application/json": {"schema": _IMAGES}},
            ),
        }
    return operations
