"""Engines that ended by themselves, kept until the control plane has received a report.

The control plane reacts to a report by requesting the list of running processes, so a report may be repeated.
It is repeated until a heartbeat that carries it was answered, and for some seconds after the end, because the
control plane may create the replica of the engine's load only after the engine has ended.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from localai_cluster.kit import clock

MAX_REPORTS = 32
"""Maximum number of reports in one heartbeat; a control plane accepts twice as many."""
REPEAT_SECONDS = 15.0
"""Seconds after the end during which every heartbeat repeats the report."""
GIVEN_UP_AFTER = 300.0
"""Seconds after which a report is dropped.

By then the control plane has detected the end itself, or it does not accept reports.
"""


@dataclass(eq=False)
class Exit:
    """One engine that has ended, `at` on the monotonic clock.

    `is_reported` is True once a heartbeat with this exit was answered.
    """

    process_key: str
    address: str
    at: float
    is_reported: bool = False

    @property
    def report(self) -> dict[str, str]:
        """The entry for this engine in a heartbeat."""
        return {"process_key": self.process_key, "address": self.address}


class Exits:
    """The exits of one worker, whose install replies give engine addresses on `host`. For one event loop."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._exits: list[Exit] = []
        self._wake_up = asyncio.Event()

    def add(self, key: str, port: int) -> None:
        """Record that an engine ended by itself."""
        self._exits.append(Exit(key, f"{self._host}:{port}", clock.monotonic()))
        self._wake_up.set()

    async def news_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for an exit that must be reported at once; return True if there is one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._wake_up.wait()
        has_exits = self._wake_up.is_set()
        self._wake_up.clear()
        return has_exits

    def due(self) -> list[Exit]:
        """Return the exits for the next heartbeat, those without an answered report first."""
        limit = clock.monotonic() - GIVEN_UP_AFTER
        self._exits = [ended for ended in self._exits if ended.at > limit]
        return sorted(self._exits, key=lambda ended: ended.is_reported)[:MAX_REPORTS]

    def answered(self, reported: Sequence[Exit], sent_at: float) -> None:
        """Record the answer to a heartbeat that was sent at `sent_at` with these exits."""
        for ended in reported:
            ended.is_reported = True
        completed = {ended for ended in reported if sent_at - ended.at >= REPEAT_SECONDS}
        self._exits = [ended for ended in self._exits if ended not in completed]
        if any(not ended.is_reported for ended in self._exits):
            self._wake_up.set()
