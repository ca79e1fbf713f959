"""A controller's part of the upgrade check (R6.35): what the galleries offer for what is installed.

It runs ten seconds after a controller starts, on a schedule, when somebody asks, when a node's list of
backends has changed, and when a page finds that a gallery has. The galleries are read again every time (A87).
Nothing is held while they and the registries of images are asked; the outcome is one transaction. The verdict
itself is made by readers (`upgrade_rules.py`). After each check come the automatic upgrades (`automatic.py`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from django.db import Error as DatabaseError

from localai_cluster import clock, conf
from localai_cluster.gallery_index import GalleryEntry, folded
from localai_cluster.names import plain
from nodes.backends import automatic, catalogue, images, install, installed, upgrade_state
from nodes.backends.upgrade_rules import Offered, Upgrade, is_image, upgrades
from nodes.models import NodeBackend
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

FIRST_AFTER = 10.0
"""Seconds after the start of a controller (C47)."""
LOOK_EVERY = 30.0
"""Seconds between two looks at what is due when no hint arrives."""
REST = 2.0
"""Seconds between two checks: an operation on a thousand nodes asks a thousand times."""
WITHIN = 120.0
"""Seconds that a check may take; well within its claim."""
_GATHER = 0.2


@dataclass(frozen=True)
class Picture:
    """The cluster's backends and the upgrades among them, of one moment."""

    backends: list[installed.InstalledBackend]
    upgrades: dict[str, Upgrade]


def picture() -> Picture:
    """What is installed, compared with what is offered; two queries."""
    backends = installed.read()
    found = upgrades(backends, upgrade_state.offers())
    return Picture(backends, {one.backend.name: one for one in found})


def offered(entries: Collection[GalleryEntry], names: Collection[str]) -> dict[str, Offered]:
    """What galleries offer under these folded names; of two entries the first, as for an install."""
    found: dict[str, Offered] = {}
    for entry in entries:
        if (name := folded(entry.name)) in names:
            found.setdefault(name, Offered(plain(entry.version[:255]), plain(entry.uri[:2048])))
    return found


async def look() -> tuple[dict[str, Offered], Mapping[str, str], str]:
    """What is offered for what is installed, what could not be read, and the fingerprint of the rest."""
    offer = await catalogue.read_all(install.galleries())
    found = offered(offer.builds, await in_thread(_names))
    wanted = [one.uri for one in found.values() if not one.version and is_image(one.uri)]
    digests = await images.digests(wanted) if wanted else {}
    with_digests = {
        name: Offered(one.version, one.uri, digests.get(one.uri, ())) for name, one in found.items()
    }
    return with_digests, offer.problems, offer.fingerprint


def _names() -> set[str]:
    rows = NodeBackend.objects.filter(node__approved_at__isnull=False, is_system=False).order_by()
    return {folded(name) for name in rows.values_list("name", flat=True).distinct()}


class UpgradeChecker:
    """Makes the checks that are due; any number of controllers may, one at a time does."""

    def __init__(self, owner: str, *, first_after: float = FIRST_AFTER, rest: float = REST) -> None:
        self._owner = owner
        self._first_after, self._rest = first_after, rest
        self._heard = asyncio.Event()

    def hint(self) -> None:
        """A check may be due; look now."""
        self._heard.set()

    async def run(self) -> None:
        """Checks when it is told and looks every `LOOK_EVERY` seconds, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._first())
            while True:
                self._heard.clear()
                done = await self.check()
                await self.follow()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await self._heard.wait()
                await asyncio.sleep(self._rest if done else _GATHER)

    async def _first(self) -> None:
        await asyncio.sleep(self._first_after)
        with contextlib.suppress(DatabaseError):
            await in_thread(upgrade_state.ask)

    async def check(self) -> bool:
        """Makes the check that is due; answers whether there was one. Never raises."""
        try:
            mine = await in_thread(upgrade_state.claim, self._owner, now=clock.now())
            if mine is None:
                return False
            found, problems, galleries = await self._look()
            kept = await in_thread(
                upgrade_state.finish, mine, found, problems=problems, galleries=galleries, now=clock.now()
            )
            if not kept:
                log.warning("the upgrade check took too long; another controller makes it")
            return True
        except DatabaseError as error:
            log.warning("the upgrade check is left out: %s", error)
            return False

    async def follow(self) -> None:
        """Makes the automatic upgrades of what the checks have found, if they are wanted. Never raises."""
        if not conf.cluster().auto_upgrade_backends:
            return
        try:
            await in_thread(automatic.follow, now=clock.now())
        except DatabaseError as error:
            log.warning("automatic upgrades are left out: %s", error)
        except Exception:
            # A defect. It must not end the checks; the next look tries again.
            log.exception("automatic upgrades failed")

    @staticmethod
    async def _look() -> tuple[dict[str, Offered], Mapping[str, str], str]:
        try:
            async with asyncio.timeout(WITHIN):
                return await look()
        except TimeoutError:
            return {}, {"": f"the check took longer than {WITHIN:.0f} s"}, ""
        except DatabaseError:
            raise
        except Exception:
            # A defect. Without this the check would stay due and fail without a pause.
            log.exception("the upgrade check failed")
            return {}, {"": "internal error; the controller's log has details"}, ""
