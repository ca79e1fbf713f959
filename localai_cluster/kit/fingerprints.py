"""Readable form of fingerprints, equal in a worker's log, on the pages and in the admin."""


def grouped(fingerprint: str) -> str:
    """Return a fingerprint in groups of four characters, so that people can read it aloud."""

    return " ".join(fingerprint[at : at + 4] for at in range(0, len(fingerprint), 4))
