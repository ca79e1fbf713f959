"""The cost of a memory estimate: reading a header, describing the model, and the terms of a load (goal 1 ms).

`python -m tests.benchmarks.bench_fit` writes the headers of some published models to a temporary folder and
prints the processor time of each step. A header is read and described once for each state of its file; a
placement pays for the terms only.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nodes.definitions.files import parse_definition
from nodes.definitions.headers import read_header
from nodes.definitions.sizes import ModelFiles
from nodes.placement import architectures, fit
from tests.support import gguf_files
from tests.support.gguf_models import MODELS

NAMES = (
    "SmolLM2-135M",
    "Llama-3.1-70B",
    "Qwen3-30B-A3B",
    "gemma-3-27b",
    "granite-4.0-h-micro",
    "DeepSeek-V3",
)
ROUNDS = 50


def milliseconds(step: Callable[[], object]) -> float:
    """Return the mean processor time of a step in milliseconds."""
    begin = time.process_time()
    for _ in range(ROUNDS):
        step()
    return (time.process_time() - begin) * 1000 / ROUNDS


def main() -> None:
    """Print the table."""
    options = parse_definition({"name": "m", "backend": "b", "parameters": {"model": "m"}}, "m.yaml").options
    print(f"{'model':<22}{'read, ms':>10}{'describe, ms':>14}{'terms, ms':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for model in (model for model in MODELS if model.name in NAMES):
            path = gguf_files.write(Path(folder) / model.name, model)
            header = read_header(path)
            assert header is not None
            files = ModelFiles(path.stat().st_size, header=header)
            describe = architectures._describe
            steps = (
                lambda path=path: read_header(path),
                lambda header=header, describe=describe: describe(header, 1),
                lambda files=files: fit.estimate(files, fit.load_options(options)),
            )
            read, described, terms = map(milliseconds, steps)
            print(f"{model.name:<22}{read:>10.2f}{described:>14.2f}{terms:>11.3f}")


if __name__ == "__main__":
    main()
