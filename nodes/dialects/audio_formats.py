"""Detection of audio formats, and the WAV header for streams. Pure.

Nothing is converted here: a response has the format that its engine produces.
"""

import struct

KINDS = {
    "wav": b"audio/wav",
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "flac": b"audio/flac",
    "aac": b"audio/aac",
    "pcm": b"audio/pcm",
}
"""Content types by the format's name in requests."""
UNKNOWN = b"application/octet-stream"
USUAL_RATE = 16000
"""Sample rate in Hz of a stream that reports none."""
_ENDLESS = 0xFFFFFFFF


def format_of(head: bytes) -> str:
    """Return the format of a file by its first bytes, "" for one that is not among `KINDS`."""
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] in (b"OggS", b"fLaC"):
        return "opus" if head[:4] == b"OggS" else "flac"
    if head[:3] == b"ID3":
        return "mp3"
    if len(head) > 1 and head[0] == 0xFF:
        # The layer bits of an MPEG frame: they are 0 for AAC.
        if head[1] & 0xF6 == 0xF0:
            return "aac"
        if head[1] & 0xE0 == 0xE0:
            return "mp3"
    return ""


def wav_head(rate: int) -> bytes:
    """Return the header of a mono 16-bit WAV of unknown length; `rate` is in Hz."""
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", _ENDLESS, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", _ENDLESS),
    )
