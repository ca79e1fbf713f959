"""Engines that have ended by themselves, until the control plane has been told.

The control plane takes a report for a question: it asks what runs now. So a report may be repeated, and it
is: until a heartbeat with it was answered, and for some seconds after the end, because the replica that a
load makes of the engine may be a moment younger than its end.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from localai_cluster import clock

MOST = 32
"""Reports of one heartbeat; a control plane takes twice as many."""
REPEATED_FOR = 15.0
"""Seconds after the end in which every heartbeat reports it."""
GIVEN_UP_AFTER = 300.0
"""Seconds after which the control plane has found out by itself, or does not take reports."""


@dataclass(eq=False)
class Exit:
    """One engine that has ended, when on the monotonic clock, and whether the control plane was told."""

    process_key: str
    address: str
    at: float
    told: bool = False

    @property
    def report(self) -> dict[str, str]:
        """What a heartbeat says of it."""
        return {"process_key": self.process_key, "address": self.address}


class Exits:
    """Those of one worker, whose engines have addresses on `host` in its replies. For one event loop."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._known: list[Exit] = []
        self._news = asyncio.Event()

    def add(self, key: str, port: int) -> None:
        """An engine has ended by itself."""
        self._known.append(Exit(key, f"{self._host}:{port}", clock.monotonic()))
        self._news.set()

    async def news_within(self, seconds: float) -> bool:
        """Waits until there is something to tell at once, `seconds` at most; answers whether there is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._news.wait()
        found = self._news.is_set()
        self._news.clear()
        return found

    def due(self) -> list[Exit]:
        """What the next heartbeat reports, what was not told before everything else."""
        limit = clock.monotonic() - GIVEN_UP_AFTER
        self._known = [one for one in self._known if one.at > limit]
        return sorted(self._known, key=lambda one: one.told)[:MOST]

    def answered(self, reported: Sequence[Exit], sent_at: float) -> None:
        """A heartbeat with these reports that left at `sent_at` was answered."""
        for one in reported:
            one.told = True
        done = {one for one in reported if sent_at - one.at >= REPEATED_FOR}
        self._known = [one for one in self._known if one not in done]
        if any(not one.told for one in self._known):
            self._news.set()
