"""One simulated worker: registered over HTTP, subscribed on the bus, sending heartbeats.

It has a connection with its own credentials, like a real worker, or shares a connection of the whole fleet.
Each command is recorded before it is executed.
"""

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field

import httpx

from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import BusError, Message, Subscription
from localai_cluster.messaging.messages import encode
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.worker.control_plane import CallFailed, ControlPlane, Registered
from localai_cluster.worker.identity import NodeIdentity
from localai_cluster.worker.registration import BusCredentials
from tests.support.simulator.machine import Machine
from tests.support.simulator.script import ALL, Script

GIBIBYTE = 1024**3
AT_ONCE = 4096
"""Maximum parallel commands of one subscription: more than any test sends."""
SIZES = {
    "total_vram": 0,
    "available_vram": 0,
    "total_ram": 32 * GIBIBYTE,
    "available_ram": 24 * GIBIBYTE,
    "total_disk": 256 * GIBIBYTE,
    "available_disk": 128 * GIBIBYTE,
}
"""The hardware that it reports: a machine without a GPU."""


class MemoryIdentity(NodeIdentity):
    """The secret of a worker without a data folder."""

    def __init__(self) -> None:
        self.secret, self.successor = secrets.token_hex(32), ""

    def is_accepted_by(self, url: str) -> bool:
        """Return True: it connects only to our servers."""
        return False

    def record_acceptance(self, url: str) -> None:
        """Do nothing: it connects only to our servers."""

    def prepare(self) -> str:
        """Generate the next secret."""
        self.successor = self.successor or secrets.token_hex(32)
        return self.successor

    def promote(self) -> None:
        """Use the next secret."""
        self.secret, self.successor = self.successor, ""


@dataclass(frozen=True)
class Home:
    """The control plane of a fleet's workers; they share `client`, and `bus` if set."""

    url: str
    token: str
    client: httpx.AsyncClient
    beat_every: float
    bus: NatsBus | None = None
    http_address: str = ""
    """Address of one HTTP server for all workers, which only shows that it is running."""


@dataclass
class SimulatedWorker:
    """A worker. `number` determines its addresses; `machine` has its state and received commands."""

    name: str
    number: int
    home: Home
    script: Script = field(default_factory=Script)
    registrations: int = 0
    missed_beats: int = 0
    sizes: dict[str, object] = field(default_factory=lambda: dict(SIZES))
    """The hardware that it reports; a test may change it, and the next heartbeat contains the change."""

    def __post_init__(self) -> None:
        self.machine = Machine(self.script, port=20000 + 10 * self.number)
        self._identity = MemoryIdentity()
        self._awake = asyncio.Event()
        self._awake.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriptions: list[Subscription] = []

    @property
    def node_id(self) -> str:
        """Return the node's id after the registration."""
        return self.machine.node_id

    async def start(self) -> None:
        """Start a new process: register and subscribe."""
        self.machine.instance = secrets.token_hex(16)
        self._plane = ControlPlane(
            self.home.url, self.home.token, self._identity, self.machine.instance, self.home.client
        )
        if self.home.bus is None:
            self.bus = NatsBus(None, name=self.name, on_refused=lambda: self.credentials.refused())
            self.credentials = BusCredentials(self.bus, None, None, self.register)
            self.bus.start()
        else:
            self.bus = self.home.bus
        await self.register()
        if self.home.bus is None:
            # Not before it knows how long the first ones last.
            self._tasks.append(asyncio.create_task(self.credentials.run()))
        await self.listen()
        await asyncio.wait_for(self.bus.wait_connected(), 60)
        self._tasks.append(asyncio.create_task(self._beat()))

    async def register(self) -> None:
        """Register with the data of a real worker; raise CallFailed."""
        registered: Registered = await self._plane.register(
            {
                "name": self.name,
                "address": f"127.0.0.1:{self.machine.port}",
                "http_address": self.home.http_address,
                "gpu_vendor": "",
                "gpu_compute_capability": "",
                "capability": "default",
                "max_replicas_per_model": 1,
                "labels": {"node.replica-slots": "1"},
                **self.sizes,
                **({} if self.script.stock else self._extensions()),
            }
        )
        self.machine.node_id = registered.node_id
        self.registrations += 1
        if self.home.bus is None:
            self.credentials.adopt(registered)

    def _extensions(self) -> dict[str, object]:
        engines = self.machine.engines.items()
        return {"running_processes": [{"process_key": key, "address": at} for key, (_, at) in engines]}

    async def listen(self) -> None:
        """Subscribe to the commands that its script knows."""
        prefix = messages.node_prefix(self.node_id)
        # Two subscriptions in place of eleven if they do; progress has more parts and does not match.
        names = ("*.*", "stop") if self.script.knows == frozenset(ALL) else sorted(self.script.knows)
        for name in names:
            subject = f"{prefix}.{name}"
            self._subscriptions.append(await self.bus.subscribe(subject, self._receive, limit=AT_ONCE))

    async def deafen(self) -> None:
        """Stay registered and send heartbeats, but end all subscriptions: commands find no responder."""
        former, self._subscriptions = self._subscriptions, []
        for subscription in former:
            await subscription.close()

    def freeze(self) -> None:
        """Freeze as by SIGSTOP: messages arrive and wait, and heartbeats stop."""
        self._awake.clear()

    def thaw(self) -> None:
        """Continue after a freeze."""
        self._awake.set()

    async def stop(self) -> None:
        """Kill the process: running commands end without an answer."""
        self.machine.end()
        self._awake.set()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.home.bus is None:
            self._subscriptions = []
            await self.bus.close()
        else:
            await self.deafen()

    async def _leave(self) -> None:
        """End as requested: first leave the registry."""
        with contextlib.suppress(CallFailed):
            await self._plane.deregister(self.node_id)
        await self.stop()

    async def restart(self) -> None:
        """End without a message, and start as another process of the same node."""
        await self.stop()
        await self.start()

    def count(self, verb: str) -> int:
        """Return the number of received commands of this name."""
        return self.machine.counts[verb]

    async def _receive(self, message: Message) -> bytes | None:
        verb = message.subject.removeprefix(f"{messages.node_prefix(self.node_id)}.")
        if verb not in self.script.knows:
            return None
        self.machine.note(verb, message.subject, message.payload)
        await self._awake.wait()
        if verb == "stop":
            # Not awaited: this very handler is among those that end.
            self._leaving = asyncio.create_task(self._leave())
            return None
        return await self.machine.answer(verb, message.payload, self._report)

    async def _report(self, event: m.ProgressEvent) -> None:
        """Publish a report; an unsent report is lost, as on a real worker."""
        await self._awake.wait()
        try:
            await self.bus.publish(messages.install_progress(self.node_id, event.op_id), encode(event))
        except BusError:
            return

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.home.beat_every)
            await self._awake.wait()
            try:
                # As a real one, which goes stale when it is not on the bus.
                if self.bus.connected:
                    await self._plane.heartbeat(self.node_id, self.sizes)
            except CallFailed as error:
                self.missed_beats += 1
                if error.http_status == 404:
                    await self._again()

    async def _again(self) -> None:
        """Register again, because the control plane does not know the node any more."""
        try:
            await self.deafen()
            await self.register()
            await self.listen()
        except CallFailed:
            self.missed_beats += 1
