"""Throughput and memory of the downloader over loopback, with one and with four connections.

`python -m tests.benchmarks.bench_downloads [GiB]` downloads one file from a source in a separate process. It
prints the rate until all bytes are received and until the file is verified, the total processor time, and the
growth of memory. With one connection the hash is computed during the download; with several connections the
file is read again for the hash.
"""

import asyncio
import multiprocessing
import resource
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import django

from localai_cluster.kit import clock

RUNS = 2


def serve(path: Path, address: "multiprocessing.Queue[str]") -> None:
    """Run a source until it is terminated."""
    set_up()
    from tests.support.sources import Source

    source = Source(files={"/m.gguf": path}, redirects=False)
    source.start()
    address.put(source.url("/m.gguf"))
    threading.Event().wait()


def set_up() -> None:
    """Configure Django without servers, which this benchmark does not need."""
    from tests.support import environment

    assert environment.HOME
    django.setup()


async def download(url: str, size: int, connections: int, folder: Path) -> tuple[float, float]:
    """Return the seconds until all bytes are received, and until the file is verified."""
    from nodes.downloads import downloader
    from nodes.downloads.downloader import Download, DownloadMeter
    from nodes.sources.plans import SourceFile
    from tests.support.sources import WebOpener

    begin, received = clock.monotonic(), 0.0
    plain = Download._verify

    async def verify(self: Download, partial: Any) -> tuple[str, str]:
        nonlocal received
        received = clock.monotonic() - begin
        return await plain(self, partial)

    async def store(*_: Any) -> None:
        pass

    class FetchedFiles:
        async def hashes_of(self, file: SourceFile) -> tuple[str, ...]:
            return ()

        async def add(self, file: SourceFile, sha256: str) -> None:
            pass

    file = SourceFile("m.gguf", url, size)
    with patch.object(Download, "_verify", verify), patch.object(downloader, "in_thread", store):
        meter = DownloadMeter({"m.gguf": size}, "")
        await Download(file, folder, WebOpener(), meter, connections, FetchedFiles()).run()
    return received, clock.monotonic() - begin


def main() -> None:
    """Print the table."""
    set_up()
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else "1") * 2**30)
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        original = Path(folder, "original")
        with original.open("wb") as file:
            file.truncate(size)
        address: multiprocessing.Queue[str] = spawning.Queue()
        server = spawning.Process(target=serve, args=(original, address), daemon=True)
        server.start()
        url = address.get()
        print(f"{'connections':<13}{'MiB/s':>8}{'verified':>10}{'ms/MiB':>8}{'memory, MiB':>13}")
        for connections in (1, 4):
            for run in range(RUNS):
                models = Path(folder, f"models-{connections}-{run}")
                models.mkdir()
                before = resource.getrusage(resource.RUSAGE_SELF)
                received, verified = asyncio.run(download(url, size, connections, models))
                after = resource.getrusage(resource.RUSAGE_SELF)
                grown = (after.ru_maxrss - before.ru_maxrss) / 1024
                busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                rates = f"{size / 2**20 / received:>8.0f}{size / 2**20 / verified:>10.0f}"
                rates += f"{busy * 1000 * 2**20 / size:>8.1f}"
                print(f"{connections:<13}{rates}{grown:>13.1f}", flush=True)
                (models / "m.gguf").unlink()
        server.terminate()


if __name__ == "__main__":
    main()
