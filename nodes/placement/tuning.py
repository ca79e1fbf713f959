"""Load options that follow from the node where a model is loaded, not from its definition (R2.80). Pure.

They are part of no revision: the same definition loads with other ones elsewhere, and is not another one.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GIB = 2**30
_MANAGED = (512, 2048)
"""Default batch sizes, which may be raised; any other value was chosen and stays."""
_CONTEXT = 4096
_SCRATCH = 1536 * 16
"""Bytes a token of context that the larger batch allocates."""
_NEW_ENOUGH = 12
_PARALLEL = ((32 * _GIB, 8), (8 * _GIB, 4), (4 * _GIB, 2))
"""Requests at a time by usable memory, the first that fits."""


@dataclass(frozen=True)
class Machine:
    """What of a node matters here."""

    total_vram: int = 0
    """Bytes; 0 = not known."""
    budget: int = 0
    """0 = all of it may be used."""
    compute_capability: str = ""

    @property
    def usable(self) -> int:
        """Bytes."""
        return min(self.total_vram, self.budget) if self.budget else self.total_vram

    @property
    def generation(self) -> int:
        """Of its GPU; 0 = not known."""
        major = self.compute_capability.partition(".")[0]
        return int(major) if major.isascii() and major.isdigit() else 0


def tuned(options: Mapping[str, Any], backend: str, machine: Machine) -> dict[str, Any]:
    """The options as this machine gets them; the given ones stay as they are."""
    found = dict(options)
    roomy = 0 < (options.get("ContextSize") or _CONTEXT) * _SCRATCH <= machine.usable // 4
    if found.get("NBatch") in _MANAGED:
        found["NBatch"] = 2048 if roomy and machine.generation >= _NEW_ENOUGH else 512
    extra = list(found.get("Options") or ())
    chosen = any(str(one).partition(":")[0].strip() in ("parallel", "n_parallel") for one in extra)
    parallel = next((count for least, count in _PARALLEL if machine.usable >= least), 0)
    if "llama-cpp" in backend.lower() and roomy and parallel and not chosen:
        found["Options"] = [*extra, f"parallel:{parallel}"]
    return found


def fingerprint(options: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of options as an engine got them."""
    content = json.dumps(options, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()
