"""Write the definition that an import saves: settings in LocalAI's form, as YAML. Pure.

The texts come from other machines. A definition is copied value by value within limits, because the aliases
in a few kilobytes of YAML can expand to gigabytes. Only the parser of definitions decides whether the result
is usable.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from localai_cluster.kit import names, untrusted
from localai_cluster.kit.errors import InvalidInput
from nodes.definitions.files import MAX_FILE_BYTES, MAX_NAME, Definition, UnusableDefinition, parse_file
from nodes.sources.variants import Variant

MAX_VALUES, DEEPEST = 5000, 32
MAX_PROMPT_LENGTH = 32 * 1024
MAX_CONTEXT = 8192
"""Maximum context in tokens that an import sets; a model that was trained for less gets less."""
LLAMA = "llama-cpp"
_IMAGE_TASKS = ("text-to-image", "image-to-image")
_BACKEND_BY_TASK = {
    **dict.fromkeys(("feature-extraction", "sentence-similarity"), "sentencetransformers"),
    "text-ranking": "rerankers",
    **dict.fromkeys(_IMAGE_TASKS, "diffusers"),
    "automatic-speech-recognition": "whisper",
    "text-to-speech": "kokoro",
}
"""By task of a safetensors repository: the backend that runs it; vLLM for all other tasks."""
USE_CASES = {
    **dict.fromkeys(("text-generation", "conversational", "image-text-to-text", "any-to-any"), "chat"),
    **dict.fromkeys(("feature-extraction", "sentence-similarity"), "embeddings"),
    "text-ranking": "rerank",
    **dict.fromkeys(_IMAGE_TASKS, "image"),
    "automatic-speech-recognition": "transcript",
    "text-to-speech": "tts",
    "text-to-video": "video",
    "object-detection": "detection",
}
"""By task of the hub: the use case in a definition."""


def definition_of(
    name: str, variant: Variant, folder: str, *, task: str = "", context: int = 0
) -> dict[str, Any]:
    """Return the settings that run a variant; `folder` is the folder of its files in the models folder."""
    if variant.format in ("safetensors", "pipeline"):
        return _of_folder(name, variant, folder, task)
    if task in _IMAGE_TASKS:
        return _base(name, "stablediffusion-ggml", f"{folder}/{variant.main}")
    settings = _base(name, LLAMA, f"{folder}/{variant.main}")
    if variant.projector:
        settings["mmproj"] = f"{folder}/{variant.projector}"
    case = USE_CASES.get(task, "chat")
    if case in ("embeddings", "rerank"):
        settings["embeddings" if case == "embeddings" else "reranking"] = True
        settings["known_usecases"] = [case]
        return settings
    settings["context_size"] = min(context or MAX_CONTEXT, MAX_CONTEXT)
    settings["known_usecases"] = ["chat", "completion", *(["vision"] if variant.projector else [])]
    # The model's own template, which its file has.
    settings["options"] = ["use_jinja:true"]
    settings["template"] = {"use_tokenizer_template": True}
    return settings


def _of_folder(name: str, variant: Variant, folder: str, task: str) -> dict[str, Any]:
    backend = "diffusers" if variant.format == "pipeline" else _BACKEND_BY_TASK.get(task, "vllm")
    settings = _base(name, backend, folder)
    case = USE_CASES.get(task, "image" if variant.format == "pipeline" else "chat")
    if case == "embeddings":
        settings["embeddings"] = True
    settings["known_usecases"] = ["chat", "completion"] if case == "chat" else [case]
    if backend == "vllm":
        settings["template"] = {"use_tokenizer_template": True}
    return settings


def _base(name: str, backend: str, model: str) -> dict[str, Any]:
    return {"name": name, "backend": backend, "parameters": {"model": model}}


def text_of(settings: Mapping[str, Any]) -> str:
    """Return settings as YAML without aliases; raise InvalidInput for too many, deep or long values."""
    try:
        text = yaml.safe_dump(_Copier().copy(settings), sort_keys=False, allow_unicode=True, width=110)
    except ValueError:  # Python formats no whole number of thousands of digits
        raise InvalidInput("the definition has a number that is too long", field="text") from None
    if len(text.encode()) > MAX_FILE_BYTES:
        raise InvalidInput(f"the definition is longer than {MAX_FILE_BYTES} bytes", field="text")
    return text


def settings_of(text: str) -> dict[str, Any]:
    """Return the settings of a definition's text; raise InvalidInput."""
    try:
        settings = untrusted.load_yaml(text, untrusted.PlainLoader)
    except untrusted.InvalidYAML as error:
        raise InvalidInput(f"the definition {error}", field="text") from None
    if not isinstance(settings, dict):
        raise InvalidInput("the definition is not a mapping of settings", field="text")
    return settings


def check_text(text: str) -> Definition:
    """Return the definition; raise InvalidInput with the reason for an unusable definition."""
    try:
        return parse_file(text.encode(), "import")
    except UnusableDefinition as error:
        raise InvalidInput(f"the definition {error}", field="text") from None


class _Copier:
    """Copies YAML values. Each copy is a new object, so that the written YAML has no aliases."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def copy(self, value: Any, level: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or level > DEEPEST:
            raise InvalidInput("the definition has too many values, or too deep ones", field="text")
        if isinstance(value, Mapping):
            return {str(key): self.copy(item, level + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.copy(item, level + 1) for item in value]
        return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def model_name(text: str) -> str:
    """Derive a model's name from the text: printable, without blanks, and without `.` or `..` parts."""
    plain = names.to_single_line(text).strip().strip("/.").replace("\\", "-").replace(" ", "-")
    parts = [part for part in plain.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME] or "model"


def with_name(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of the settings with `name` as the model's name."""
    return {"name": name, **{key: value for key, value in settings.items() if key != "name"}}
