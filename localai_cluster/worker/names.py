"""Names from outside that become folder names: what is stripped and what is refused."""

from localai_cluster.errors import InvalidInput

STAGED, BACKUP, LEAVING, PARTIAL = ".install-tmp", ".install-backup", ".leaving-", ".partial-"
LIMIT = 200


def strip_gallery(name: str) -> str:
    """`gallery@name` without the gallery; files are installed under the bare name."""
    return name.rpartition("@")[2].strip()


def folder_name(name: str) -> str:
    """The folder of the backend `name`; `/` becomes `__`. InvalidInput for an unsafe name."""
    folder = name.replace("/", "__")
    if not folder:
        raise InvalidInput("backend name is empty", field="backend")
    if folder.startswith(".") or "\\" in folder or not folder.isprintable() or len(folder.encode()) > LIMIT:
        raise InvalidInput(f"not a backend name: {name[:80]!r}", field="backend")
    if folder.lower().endswith((STAGED, BACKUP)):
        raise InvalidInput(f"not a backend name: {name[:80]!r} is reserved", field="backend")
    return folder


def printable(text: str) -> str:
    """A text from outside, safe for a log line."""
    return text if text.isprintable() and 0 < len(text) <= 100 else repr(text[:100]) if text else "-"


def model_name(name: str) -> str:
    """Checks a model id for use in a process key; empty is allowed. InvalidInput."""
    if len(name) > LIMIT * 2 or not (name.isprintable() or not name):
        raise InvalidInput("not a model id: too long or not printable", field="model_id")
    return name
