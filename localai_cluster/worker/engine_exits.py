"""Engines that ended by themselves, kept until the control plane has received a report.

After a report the control plane requests the list of running processes, so a report may be repeated. A report
is repeated until a heartbeat with it was answered, and for some seconds after the end. The control plane may
create the replica of the engine's load only after the engine has ended.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from localai_cluster.kit import cancellation, clock

MAX_REPORTS_PER_HEARTBEAT = 32
"""Maximum number of reports in one heartbeat; a control plane accepts twice as many."""
REPORT_REPEAT_SECONDS = 15.0
"""Seconds after an engine's end during which every heartbeat repeats the report."""
REPORT_MAX_AGE_SECONDS = 300.0
"""Seconds after an engine's end at which its report is dropped.

By then the control plane has detected the end itself, or it does not accept reports.
"""


@dataclass(eq=False)
class Exit:
    """An engine that has ended; `at` is a time of the monotonic clock.

    `is_reported` is True after a heartbeat with this exit was answered.
    """

    process_key: str
    address: str
    at: float
    is_reported: bool = False

    @property
    def report(self) -> dict[str, str]:
        """The entry for this exit in the body of a heartbeat."""
        return {"process_key": self.process_key, "address": self.address}


class Exits:
    """The engine exits of one worker that a heartbeat must report. Use it on one event loop.

    `host` is the host of the engine addresses in install replies.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._exits: list[Exit] = []
        self._wake_up = asyncio.Event()

    def add(self, key: str, port: int) -> None:
        """Record that the engine `key` has ended by itself."""
        self._exits.append(Exit(key, f"{self._host}:{port}", clock.monotonic()))
        self._wake_up.set()

    async def wait_for_exit(self, seconds: float) -> bool:
        """Wait at most `seconds` for an exit to report at once; return True if there is one."""
        has_exits = await cancellation.wait_for(self._wake_up, max(seconds, 0.0))
        self._wake_up.clear()
        return has_exits

    def due(self) -> list[Exit]:
        """Return the exits for the next heartbeat; exits without an answered report come first."""
        limit = clock.monotonic() - REPORT_MAX_AGE_SECONDS
        self._exits = [ended for ended in self._exits if ended.at > limit]
        return sorted(self._exits, key=lambda ended: ended.is_reported)[:MAX_REPORTS_PER_HEARTBEAT]

    def record_answer(self, reported: Sequence[Exit], sent_at: float) -> None:
        """Record that a heartbeat with these exits, sent at `sent_at`, was answered."""
        for ended in reported:
            ended.is_reported = True
        completed = {ended for ended in reported if sent_at - ended.at >= REPORT_REPEAT_SECONDS}
        self._exits = [ended for ended in self._exits if ended not in completed]
        if any(not ended.is_reported for ended in self._exits):
            self._wake_up.set()
