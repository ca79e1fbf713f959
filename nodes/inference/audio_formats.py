"""What kind of sound a file or a stream is. Pure.

Nothing is converted here: an answer has the format that its engine makes.
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
"""Formats by their name in requests, and their content types."""
UNKNOWN = b"application/octet-stream"
USUAL_RATE = 16000
"""Samples a second of a stream that does not say."""
_ENDLESS = 0xFFFFFFFF


def format_of(head: bytes) -> str:
    """The format of a file by its first bytes, "" for one that is not among `KINDS`."""
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] in (b"OggS", b"fLaC"):
        return "opus" if head[:4] == b"OggS" else "flac"
    if head[:3] == b"ID3":
        return "mp3"
    if len(head) > 1 and head[0] == 0xFF:
        # The layer of an MPEG frame: none is AAC's.
        if head[1] & 0xF6 == 0xF0:
            return "aac"
        if head[1] & 0xE0 == 0xE0:
            return "mp3"
    return ""


def wav_head(rate: int) -> bytes:
    """The head of a WAV of 16 bits and one channel whose length is not known yet."""
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", _ENDLESS, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", _ENDLESS),
    )
