"""Use cases of a model: those that its definition states, otherwise what its engine does. Pure.

The reference's pages and clients read them as flags (`FLAG_CHAT`) to offer a model where it is of use.
"""

from collections.abc import Mapping
from typing import Any

USE_CASES = (
    *("chat", "completion", "edit", "embeddings", "rerank", "image", "transcript", "tts"),
    *("sound_generation", "tokenize", "vad", "video", "detection", "vision", "diarization"),
    *("audio_transform", "realtime_audio", "face_recognition", "speaker_recognition"),
)
"""The names that `known_usecases` of a definition may have."""
_TEXT = ("chat", "completion", "tokenize")
_GROUPS: Mapping[str, tuple[str, ...]] = {"llm": ("chat", "completion", "edit"), "any": ()}
_ENGINES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("whisper", "parakeet", "moonshine", "nemo", "qwen-asr"), ("transcript",)),
    **dict.fromkeys(("piper", "kokoro", "kitten-tts", "bark", "coqui", "chatterbox", "vibevoice"), ("tts",)),
    **dict.fromkeys(("diffusers", "stablediffusion", "stablediffusion-ggml", "flux"), ("image",)),
    **dict.fromkeys(("rerankers",), ("rerank",)),
    **dict.fromkeys(("silero-vad",), ("vad",)),
    **dict.fromkeys(("rfdetr",), ("detection",)),
    **dict.fromkeys(("sentencetransformers", "minilm"), ("embeddings",)),
}
"""Use cases of the reference's engines that do not answer with text; the key is a part of the name."""


Names = tuple[str, ...]


def parse(stated: object, backend: str, options: Mapping[str, Any]) -> tuple[Names, Names]:
    """Return the use cases of a definition, and warnings about what it states.

    `stated` is its `known_usecases`: names with or without `FLAG_`, in any case.
    """
    if stated is None:
        return of_engine(backend, options), ()
    if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        warning = "`known_usecases` is not a list of names and is ignored"
        return of_engine(backend, options), (warning,)
    names = [name.strip().lower().removeprefix("flag_") for name in stated]
    chosen = {case for name in names for case in _GROUPS.get(name, (name,))}
    unknown = sorted(chosen - set(USE_CASES))
    warnings = tuple(f"`known_usecases` has the unknown name {name[:64]!r}" for name in unknown)
    known = tuple(case for case in USE_CASES if case in chosen)
    return known or of_engine(backend, options), warnings


def of_engine(backend: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what an engine does with these load options; an unknown engine answers with text."""
    if options.get("Embeddings"):
        return ("embeddings",)
    if options.get("Reranking"):
        return ("rerank",)
    name = f"-{backend.rpartition('@')[2].lower()}-"
    for part, cases in _ENGINES.items():
        if f"-{part}-" in name:
            return cases
    return (*_TEXT, "vision") if options.get("MMProj") else _TEXT


def to_flags(cases: tuple[str, ...]) -> list[str]:
    """Return the use cases as the reference's flags."""
    return [f"FLAG_{case.upper()}" for case in cases]
