"""A controller's part of the upgrade check (R6.35): read what the galleries offer for the installed backends.

It runs ten seconds after a controller starts, on a schedule, on request, when a node's list of backends has
changed, and when a page finds that a gallery has changed. Each check reads the galleries again (A87), and the
digests of images from their registries, to detect tags that have moved (R6.34): only manifests, each read
bounded in time and bytes. No lock is held meanwhile; one transaction stores the
result. Readers compare it with the installed backends (`installed.py`). Automatic upgrades follow each check
(`automatic.py`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import httpx
from django.db import Error as DatabaseError

from localai_cluster.gallery_index import GalleryEntry, folded
from localai_cluster.kit import clock, conf
from localai_cluster.kit.names import plain
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.registries import references
from localai_cluster.registries.access import Access, RegistryError, default_config
from localai_cluster.registries.client import Registries
from nodes.backends import automatic, catalogue, installed, node_commands, upgrade_state
from nodes.backends.installed import Offered, Upgrade, is_image, upgrades
from nodes.models import NodeBackend
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

DIGESTS_WITHIN = 10.0
"""Seconds for one image, its token included."""
ALL_WITHIN = 30.0
AT_ONCE, MOST = 8, 200


async def image_digests(uris: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the digests by URI: that of the image, then those of its builds for single platforms.

    Workers record the digest of a build. Images that cannot be read are left out and logged. Never raise, and
    never take longer than `ALL_WITHIN`.
    """
    unique_uris, settings = sorted(set(uris)), conf.cluster()
    if len(unique_uris) > MOST:
        log.warning("upgrade check: the digests of %d images are left out", len(unique_uris) - MOST)
    digests_by_uri: dict[str, tuple[str, ...]] = {}
    semaphore = asyncio.Semaphore(AT_ONCE)

    async def read(uri: str, registries: Registries) -> None:
        async with semaphore:
            try:
                async with asyncio.timeout(DIGESTS_WITHIN):
                    digests_by_uri[uri] = await _digests(uri, registries)
            except (RegistryError, TimeoutError) as error:
                log.warning("upgrade check: image %s: %s", uri, str(error) or type(error).__name__)
            except Exception:
                # A defect in reading one image must not lose the check of the others.
                log.exception("upgrade check: image %s", uri)

    try:
        async with (
            asyncio.timeout(ALL_WITHIN),
            httpx.AsyncClient(timeout=DIGESTS_WITHIN, verify=settings.registry_ca or True) as client,
        ):
            access = Access(settings.registries, settings.registry_config or default_config())
            registries = Registries(client, access)
            await asyncio.gather(*(read(uri, registries) for uri in unique_uris[:MOST]))
    except TimeoutError:
        log.warning(
            "upgrade check: %d images were not looked at in time",
            len(unique_uris[:MOST]) - len(digests_by_uri),
        )
    return digests_by_uri


async def _digests(uri: str, registries: Registries) -> tuple[str, ...]:
    reference = references.parse(uri)
    if reference is None:
        raise RegistryError("not the reference of an image")
    return await registries.digests(reference)


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
class UpgradeOverview:
    """Snapshot of the cluster's backends and their upgrades."""

    backends: list[installed.InstalledBackend]
    upgrades: dict[str, Upgrade]


def picture() -> UpgradeOverview:
    """Read the snapshot: installed backends, compared with the offers; two queries."""
    backends = installed.read()
    available = upgrades(backends, upgrade_state.offers())
    return UpgradeOverview(backends, {upgrade.backend.name: upgrade for upgrade in available})


def offered(entries: Collection[GalleryEntry], names: Collection[str]) -> dict[str, Offered]:
    """Return the galleries' offers under these folded names; the first of two entries, as for an install."""
    offers: dict[str, Offered] = {}
    for entry in entries:
        if (name := folded(entry.name)) in names:
            offers.setdefault(name, Offered(plain(entry.version[:255]), plain(entry.uri[:2048])))
    return offers


async def look() -> tuple[dict[str, Offered], Mapping[str, str], str]:
    """Return the offers for installed backends, the unreadable galleries, and the catalogue's fingerprint."""
    readings = await catalogue.read_all(node_commands.galleries())
    offer = await in_thread(catalogue.combine, readings, now=clock.now())
    offers = offered(offer.builds, await in_thread(_names))
    image_uris = [entry.uri for entry in offers.values() if not entry.version and is_image(entry.uri)]
    digests_by_uri = await image_digests(image_uris) if image_uris else {}
    with_digests = {
        name: Offered(entry.version, entry.uri, digests_by_uri.get(entry.uri, ()))
        for name, entry in offers.items()
    }
    return with_digests, offer.problems, offer.fingerprint


def _names() -> set[str]:
    rows = NodeBackend.objects.filter(node__approved_at__isnull=False, is_system=False).order_by()
    return {folded(name) for name in rows.values_list("name", flat=True).distinct()}


class UpgradeChecker(PeriodicTask):
    """Periodic task that makes the due checks; a claim gives each check to one controller."""

    def __init__(self, owner: str, *, first_after: float = FIRST_AFTER, rest: float = REST) -> None:
        super().__init__("upgrade check", self._check_and_follow, interval=LOOK_EVERY, gather=_GATHER)
        self._owner = owner
        self._first_after, self._rest = first_after, rest

    async def run(self) -> None:
        """Poll after each wake-up and every `LOOK_EVERY` seconds, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._first())
            await super().run()

    async def _check_and_follow(self) -> None:
        done = await self.check()
        await self.follow()
        if done:
            await asyncio.sleep(self._rest)

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
