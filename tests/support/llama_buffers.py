"""The memory that llama.cpp takes for a file: the buffers that it reports, and its process memory.

A separate process loads the file with mapped weights, without repacked copies, and with `fit` switched off,
because `fit` would change context and layers. The process is ended when it has reported its last buffer.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.backends import gallery

_LOAD = """
import json, sys
import xllamacpp
def pss(kind):
    (line,) = (line for line in open("/proc/self/smaps_rollup") if line.startswith("Pss_" + kind))
    return int(line.split()[1]) / 1024
before = pss("Anon")
made = xllamacpp.CommonParams()
made.model.path, made.fit_params, made.warmup, made.n_gpu_layers = sys.argv[1], False, False, 0
made.hostnames, made.port, made.ui, made.verbosity, made.no_extra_bufts = ["127.0.0.1"], 0, False, 4, True
made.kv_unified = True
for name, value in json.loads(sys.argv[2]).items():
    setattr(made, name, value)
server = xllamacpp.Server(made)
if len(sys.argv) > 3:
    server.handle_completions({"prompt": "word " * int(sys.argv[3]), "max_tokens": 1})
    print(json.dumps({"anonymous": pss("Anon") - before, "file": pss("File")}), flush=True)
"""
_BUFFER = re.compile(r"(model|output|KV|RS|compute) buffer size = +([\d.]+) MiB")
_LAST = "reserve took"


PROMPT = 600
"""Tokens that are read before a process is measured: more than a batch, so that all buffers are used."""


class NotLoaded(Exception):
    """llama.cpp refused the file; the text is its output."""


def measure(path: Path, parameters: str = "{}") -> Counter[str]:
    """Return the MiB of each kind of buffer; `parameters` are JSON of `CommonParams`."""
    sizes, log = Counter[str](), []
    with _start(path, parameters, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
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


def measure_process(path: Path, parameters: str = "{}") -> dict[str, float]:
    """Return the MiB of a process after a prompt: its own memory (PSS) and its mapped files."""
    with _start(path, parameters, str(PROMPT), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            found: dict[str, float] = json.loads(process.stdout.readline())
        finally:
            process.kill()
    return found


def _start(path: Path, *arguments: str, stdout: int, stderr: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(gallery() / "llama-cpp" / "lib")}
    argv = [sys.executable, "-c", _LOAD, str(path), *arguments]
    return subprocess.Popen(argv, env=environment, text=True, errors="replace", stdout=stdout, stderr=stderr)
