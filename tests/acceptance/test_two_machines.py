"""A second machine joins by the printed line and serves; the cable is pulled; its secret is revoked.

Another one installs an image of a registry that the server's machine has, chats, is upgraded when the image's
digest changes, and gives the backend back.

Network namespaces play the machines. The second one has no internet: it finds the packages that the worker
needs in a folder, where they were packed from what `make install` brought. The package of the product names
the hashes of these.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.demo.figures import compare
from localai_cluster.embedded.layout import link_or_copy
from tests.conftest import eventually
from tests.support import wheel
from tests.support.effort import EFFORT, swept
from tests.support.machines import Machine, two_machines
from tests.support.run import ROOT, Run
from tests.wire import real_registry

DEMO = json.loads((ROOT / "examples" / "demo.json").read_text())
PORT = 8080
REGISTRY_PORT = 5000
IMAGE = "chatty"
"""The image, the backend and the model."""
SOON = {"LOCALAI_HEARTBEAT_INTERVAL": "1s"}
"""So that a cut cable is noticed within seconds."""

pytestmark = [
    swept,
    pytest.mark.timeout(1800),
]


class Site:
    """The cluster on one machine, and another machine that may join."""

    def __init__(self, home: Path, here: Machine, there: Machine) -> None:
        self.home, self.here, self.there = home, here, there
        self.url = f"http://{here.address}:{PORT}"
        self.registry = f"{here.address}:{REGISTRY_PORT}"
        plain = json.dumps([{"host": self.registry, "plain_http": True}])
        self.settings = {"LOCALAI_REGISTRIES": plain, **SOON}
        (home / "gallery").mkdir()
        for file in (ROOT / "build" / "gallery").glob("*.*"):
            link_or_copy(file, home / "gallery" / file.name)
        galleries = [{"name": name, "url": f"cluster:{name}.yaml"} for name in ("index", "images")]
        index = f"- name: {IMAGE}\n  uri: oci://{self.registry}/{IMAGE}:latest\n"
        (home / "gallery" / "images.yaml").write_text(index)
        self.run = Run(
            home / "server" / "data",
            PORT,
            here.prefix,
            HOST=here.address,
            CLUSTER_NODE_STALE_AFTER="5s",
            LOCALAI_EXPOSE_NODE_HEADER="true",
            CLUSTER_WHEEL_DIR=str(home / "wheels"),
            CLUSTER_GALLERY_DIR=str(home / "gallery"),
            LOCALAI_BACKEND_GALLERIES=json.dumps(galleries),
            **self.settings,
        )
        self.joined: list[subprocess.Popen[bytes]] = []
        self.others: list[subprocess.Popen[bytes]] = []

    @property
    def said(self) -> str:
        """What the other machine has printed."""
        return (self.home / "there.log").read_text(errors="replace")

    def runs(self) -> bool:
        """Whether the line that was pasted still runs: it becomes the worker."""
        return all(one.poll() is None for one in self.joined)

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """A request of an admin on the server's machine."""
        headers = {"Authorization": f"Bearer {self.run.key}"}
        return self.here.http(method, self.url + path, headers=headers, json=body)

    def node(self, *, local: bool = False) -> dict[str, Any]:
        """The other machine's node, or that of the server's own worker; empty if there is none."""
        nodes = self.ask("GET", "/api/nodes").json()
        return next((one for one in nodes if (one["name"] == "local") == local), {})

    def paste(self, line: str) -> None:
        """Runs the line on the other machine, in an empty home."""
        home, programs = self.home / "there", self.home / "bin"
        for folder in (home, programs):
            folder.mkdir()
        (programs / "python3").symlink_to(Path(sys.executable).resolve())
        environment = {
            "HOME": str(home),
            "PATH": f"{programs}:{os.defpath}",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.home / "packages"),
            **self.settings,
        }
        with (self.home / "there.log").open("wb") as log:
            self.joined.append(self.there.start("sh", "-c", line, env=environment, output=log, cwd=home))

    def embeds(self, body: Any) -> httpx.Response:
        """An answer of the other machine's engine."""
        answer = self.ask("POST", "/v1/embeddings", body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-LocalAI-Node"] == self.node()["id"]
        return answer

    def on_bus(self) -> bool:
        """Whether the other machine has a connection to the bus."""
        return self.there.connected_to(int((self.run.data / "nats-port").read_text()))

    def stop(self) -> None:
        """Ends both, in order."""
        for one in (*self.joined, *self.others):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(one.pid, signal.SIGTERM)
                one.wait(60)
        self.run.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.run.process.wait(120)


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="two-machines-") as folder, two_machines() as machines:
        home = Path(folder)
        (home / "server" / "data").mkdir(parents=True)
        wheel.pack(home / "packages")
        wheel.relock(wheel.build(home / "wheels"), home / "packages")
        made = Site(home, *machines)
        try:
            yield made
        finally:
            made.stop()


def done(site: Site, path: str, body: Any) -> None:
    """Asks for work on a backend and waits for its end."""
    job = site.ask("POST", path, body).raise_for_status().json()["statusUrl"]
    state = eventually(
        lambda: (found := site.ask("GET", job).json()).get("processed") and found,
        seconds=120,
        what=f"{path} has ended",
    )
    assert not state.get("error"), state


def join(site: Site) -> None:
    """The other machine joins by the printed line, is approved, and is the only one that serves."""
    site.run.wait_ready()
    printed = site.run.data / "secrets" / "join_command"
    eventually(printed.exists, seconds=10, what="the line for other machines")
    assert "cannot install the worker" not in site.run.output
    line = printed.read_text().strip()
    assert "\n" not in line
    site.paste(line)
    eventually(lambda: site.node() or not site.runs(), seconds=120, what="it registers")
    assert site.runs(), site.said
    node = site.node()
    assert node["status"] == "pending"
    assert not site.on_bus()
    fingerprint = site.ask("GET", f"/api/nodes/{node['id']}").json()["identity"]["fingerprint"]
    assert f"fingerprint={fingerprint}" in site.said.replace(" ", "")

    site.ask("POST", f"/api/nodes/{node['id']}/approve").raise_for_status()
    eventually(lambda: site.node()["status"] == "healthy" and site.on_bus(), seconds=60, what="it works")
    site.ask("POST", f"/api/nodes/{site.node(local=True)['id']}/drain", {}).raise_for_status()


def test_a_second_machine_joins_serves_loses_its_cable_and_is_revoked(site: Site) -> None:
    join(site)
    node = site.node()
    for backend in ("echo", "minilm"):
        done(site, f"/api/nodes/{node['id']}/backends/install", {"backend": backend})
    site.embeds({"model": "echo", "input": "a cat"})
    body = DEMO["request"]["body"]
    figures = compare(site.embeds(body).json(), body["input"], DEMO["expect"])
    assert all(figure.holds for figure in figures), figures

    for _ in range(EFFORT):
        site.there.cut()
        eventually(lambda: site.node()["status"] == "offline", seconds=30, what="it is missed")
        site.there.restore()
        eventually(lambda: site.node()["status"] == "healthy" and site.on_bus(), seconds=60, what="back")
        assert site.runs(), site.said
        eventually(partial(serves, site), seconds=60, what="it serves again")

    site.ask("POST", f"/api/nodes/{node['id']}/identity/revoke", {"reason": "stolen"}).raise_for_status()
    eventually(lambda: not site.on_bus(), seconds=5, what="it is off the bus")
    assert site.ask("POST", "/v1/embeddings", {"model": "nothing", "input": "x"}).status_code == 404
    assert site.node()["status"] == "pending"


def pushed(site: Site, folder: Path) -> str:
    """Pushes a backend to the registry from the server's machine; the image's digest."""
    script = ROOT / "examples" / "gallery" / "image.py"
    image = f"http://{site.registry}/{IMAGE}:latest"
    command = [
        *site.here.prefix,
        sys.executable,
        str(script),
        str(folder),
        image,
        "--pack",
        "zstd",
        "--layers",
        "2",
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def chat(site: Site) -> str:
    """What the other machine says."""
    body = {"model": IMAGE, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}
    answer = site.ask("POST", "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-LocalAI-Node"] == site.node()["id"]
    return str(answer.json()["choices"][0]["message"]["content"])


def build(site: Site) -> dict[str, Any]:
    """The backend of the image as the other machine lists it; empty if it has none."""
    listed = site.ask("GET", f"/api/nodes/{site.node()['id']}/backends").json()
    return next((backend for backend in listed if backend["name"] == IMAGE), {})


@pytest.mark.rule("worker-18.6", "R6.34")
def test_an_image_is_installed_on_a_second_machine_chats_is_upgraded_by_its_digest_and_deleted(
    site: Site,
) -> None:
    command = real_registry.configured(site.home / "registry", site.registry)
    with (site.home / "registry" / "log").open("wb") as log:
        environment = {"OTEL_TRACES_EXPORTER": "none"}
        site.others.append(site.here.start(*command, env=environment, output=log, cwd=site.home))
    folder = site.home / "image"
    shutil.copytree(ROOT / "build" / "gallery" / "llama-cpp", folder)
    (folder / "metadata.json").write_text(f'{{"name": "{IMAGE}"}}')
    join(site)
    first = pushed(site, folder)
    done(site, f"/api/nodes/{site.node()['id']}/backends/install", {"backend": IMAGE})
    assert (build(site)["digest"], build(site)["uri"]) == (first, f"oci://{site.registry}/{IMAGE}:latest")
    definition = (site.run.data / "models" / "smollm2.yaml").read_text()
    definition = definition.replace("name: smollm2", f"name: {IMAGE}").replace(
        "backend: llama-cpp", f"backend: {IMAGE}"
    )
    (site.run.data / "models" / f"{IMAGE}.yaml").write_text(definition)
    said = eventually(lambda: chat(site), seconds=60, what="it chats")
    assert said

    (folder / "new").write_text("new")
    second = pushed(site, folder)
    site.ask("POST", "/api/backends/upgrades/check", {}).raise_for_status()
    offer = eventually(
        lambda: site.ask("GET", "/api/backends/upgrades").json().get(IMAGE), seconds=60, what="it is offered"
    )
    assert offer["installed_digest"] == first
    done(site, f"/api/backends/upgrade/{IMAGE}", {})
    assert build(site)["digest"] == second != first
    eventually(
        lambda: IMAGE not in site.ask("GET", "/api/backends/upgrades").json(),
        seconds=60,
        what="it is current",
    )
    assert chat(site)
    done(site, f"/api/backends/delete/{IMAGE}", {})
    assert build(site) == {}
    assert not list((site.home / "there").rglob(f"backends/{IMAGE}"))


def serves(site: Site) -> bool:
    """Whether the other machine answers; a request may still meet what the cut has left."""
    answer = site.ask("POST", "/v1/embeddings", {"model": "echo", "input": "a cat"})
    return answer.status_code == 200 and answer.headers["X-LocalAI-Node"] == site.node()["id"]
