"""A controller's part of the upgrade check (R6.35): read what the galleries offer for the installed backends.

It runs ten seconds after a controller starts, on a schedule, on request, when a node's list of backends has
changed, and when a page finds that a gallery has changed. Each check reads the galleries again (A87). No lock
is held while galleries and image registries are queried; one transaction stores the result. Readers compare
it with the installed backends (`upgrade_rules.py`). Automatic upgrades follow each check (`automatic.py`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from django.db import Error as DatabaseError

from localai_cluster.gallery_index import GalleryEntry, folded
from localai_cluster.kit import clock, conf
from localai_cluster.kit.names import plain
from nodes.backends import automatic, catalogue, images, install, installed, upgrade_state
from nodes.backends.upgrade_rules import Offered, Upgrade, is_image, upgrades
from nodes.models import NodeBackend
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

FIRST_AFTER = 10.0
"""Seconds after the start of a controller (C47)."""
LOOK_EVERY = 30.0
"""Seconds between two polls for a due check when no wake-up arrives."""
REST = 2.0
"""Seconds between two checks: an operation on a thousand nodes requests a thousand of them."""
WITHIN = 120.0
"""Time limit of a check in seconds; well within its claim."""
_GATHER = 0.2


@dataclass(frozen=True)
class Picture:
    """Snapshot of the cluster's backends and their upgrades."""

    backends: list[installed.InstalledBackend]
    upgrades: dict[str, Upgrade]


def picture() -> Picture:
    """Read the snapshot: installed backends, compared with the offers; two queries."""
    backends = installed.read()
    available = upgrades(backends, upgrade_state.offers())
    return Picture(backends, {upgrade.backend.name: upgrade for upgrade in available})


def offered(entries: Collection[GalleryEntry], names: Collection[str]) -> dict[str, Offered]:
    """Return the galleries' offers under these folded names; the first of two entries, as for an install."""
    offers: dict[str, Offered] = {}
    for entry in entries:
        if (name := folded(entry.name)) in names:
            offers.setdefault(name, Offered(plain(entry.version[:255]), plain(entry.uri[:2048])))
    return offers


async def look() -> tuple[dict[str, Offered], Mapping[str, str], str]:
    """Return the offers for installed backends, the unreadable galleries, and the catalogue's fingerprint."""
    offer = await catalogue.read_all(install.galleries())
    offers = offered(offer.builds, await in_thread(_names))
    image_uris = [entry.uri for entry in offers.values() if not entry.version and is_image(entry.uri)]
    digests = await images.digests(image_uris) if image_uris else {}
    with_digests = {
        name: Offered(entry.version, entry.uri, digests.get(entry.uri, ())) for name, entry in offers.items()
    }
    return with_digests, offer.problems, offer.fingerprint


def _names() -> set[str]:
    rows = NodeBackend.objects.filter(node__approved_at__isnull=False, is_system=False).order_by()
    return {folded(name) for name in rows.values_list("name", flat=True).distinct()}


class UpgradeChecker:
    """Periodic task that makes the due checks; a claim gives each check to one controller."""

    def __init__(self, owner: str, *, first_after: float = FIRST_AFTER, rest: float = REST) -> None:
        self._owner = owner
        self._first_after, self._rest = first_after, rest
        self._wakeup = asyncio.Event()

    def wake(self) -> None:
        """Check now if a check is due."""
        self._wakeup.set()

    async def run(self) -> None:
        """Poll after each wake-up and every `LOOK_EVERY` seconds, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._first())
            while True:
                self._wakeup.clear()
                done = await self.check()
                await self.follow()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await self._wakeup.wait()
                await asyncio.sleep(self._rest if done else _GATHER)

    async def _first(self) -> None:
        await asyncio.sleep(self._first_after)
        with contextlib.suppress(DatabaseError):
            await in_thread(upgrade_state.ask)

    async def check(self) -> bool:
        """Make the check that is due; return True if there was one. Never raise."""
        try:
            claim = await in_thread(upgrade_state.claim, self._owner, now=clock.now())
            if claim is None:
                return False
            offers, problems, galleries = await self._bounded_look()
            is_stored = await in_thread(
                upgrade_state.finish, claim, offers, problems=problems, galleries=galleries, now=clock.now()
            )
            if not is_stored:
                log.warning("the upgrade check took too long; another controller makes it")
            return True
        except DatabaseError as error:
            log.warning("the upgrade check is left out: %s", error)
            return False

    async def follow(self) -> None:
        """Create the automatic upgrades after the checks, if the setting is on. Never raise."""
        if not conf.cluster().auto_upgrade_backends:
            return
        try:
            await in_thread(automatic.follow, now=clock.now())
        except DatabaseError as error:
            log.warning("automatic upgrades are left out: %s", error)
        except Exception:
            # A defect. It must not end the checks; the next poll retries them.
            log.exception("automatic upgrades failed")

    @staticmethod
    async def _bounded_look() -> tuple[dict[str, Offered], Mapping[str, str], str]:
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
