"""The buffers that llama.cpp allocates for a file, as it reports them itself.

A process of its own loads the file, with the weights mapped, without copies in another layout and with `fit`
switched off, which would change context and layers. It is ended when it has reported its last buffer.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.backends import gallery

_LOAD = """
import json, sys
import xllamacpp
made = xllamacpp.CommonParams()
made.model.path, made.fit_params, made.warmup, made.n_gpu_layers = sys.argv[1], False, False, 0
made.hostnames, made.port, made.ui, made.verbosity, made.no_extra_bufts = ["127.0.0.1"], 0, False, 4, True
made.kv_unified = True
for name, value in json.loads(sys.argv[2]).items():
    setattr(made, name, value)
xllamacpp.Server(made)
"""
_BUFFER = re.compile(r"(model|output|KV|RS|compute) buffer size = +([\d.]+) MiB")
_LAST = "reserve took"


class NotLoaded(Exception):
    """llama.cpp refused the file; the text is what it said."""


def measure(path: Path, parameters: str = "{}") -> Counter[str]:
    """Return the MiB of each kind of buffer; `parameters` are JSON of `CommonParams`."""
    environment = {**os.environ, "PYTHONPATH": str(gallery() / "llama-cpp" / "lib")}
    argv: list[Any] = [sys.executable, "-c", _LOAD, path, parameters]
    sizes, log = Counter[str](), []
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                log.append(line)
                if found := _BUFFER.search(line):
                    sizes[found[1]] += float(found[2])  # type: ignore[assignment]
                if _LAST in line:
                    return sizes
        finally:
            process.kill()
    raise NotLoaded("".join(line for line in log if " E " in line) or "".join(log[-5:]))
