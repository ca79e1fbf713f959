"""Rules for external names that become folder names: parts to strip, and names to refuse."""

from localai_cluster.kit.errors import InvalidInput

STAGED, BACKUP, LEAVING, PARTIAL = ".install-tmp", ".install-backup", ".leaving-", ".partial-"
LIMIT = 200


def strip_gallery(name: str) -> str:
    """Strip the gallery from `gallery@name`; files are installed under the bare name."""
    return name.rpartition("@")[2].strip()


def folder_name(name: str) -> str:
    """Return the folder of the backend `name`; `/` becomes `__`. Raise InvalidInput for an unsafe name."""
    folder = name.replace("/", "__")
    if not folder:
        raise InvalidInput("backend name is empty", field="backend")
    if folder.startswith(".") or "\\" in folder or not folder.isprintable() or len(folder.encode()) > LIMIT:
        raise InvalidInput(f"not a backend name: {name[:80]!r}", field="backend")
    if folder.lower().endswith((STAGED, BACKUP)):
        raise InvalidInput(f"not a backend name: {name[:80]!r} is reserved", field="backend")
    return folder


def printable(text: str) -> str:
    """Format a text from outside safely for a log line."""
    return text if text.isprintable() and 0 < len(text) <= 100 else repr(text[:100]) if text else "-"


def model_name(name: str) -> str:
    """Check a model id for use in a process key; empty is allowed. Raise InvalidInput."""
    if len(name) > LIMIT * 2 or not (name.isprintable() or not name):
        raise InvalidInput("not a model id: too long or not printable", field="model_id")
    return name
