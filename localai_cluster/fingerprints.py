"""Fingerprints as people compare them: the same form in a worker's log, on the pages and in the admin."""


def grouped(fingerprint: str) -> str:
    """A fingerprint in groups of four, so that two people can read it to each other."""
    return " ".join(fingerprint[at : at + 4] for at in range(0, len(fingerprint), 4))
