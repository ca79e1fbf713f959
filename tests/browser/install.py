"""Finds Chromium for the browser's tests, or has Debian install it; `make test` calls this first.

Never fails by itself: without a browser it says in one line which tests are left out and how to have them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

PROGRAMS = ("chromium-headless-shell", "chromium")
"""Debian's builds, the preferred first: without a window's parts a page costs a fifth less of a processor."""
PACKAGES = (PROGRAMS[0], "fonts-noto-core", "fonts-noto-color-emoji")
LEFT_OUT = "browser: no Chromium, so tests/browser is skipped. Install it with: apt-get install " + " ".join(
    PACKAGES
)
UPDATE_SECONDS, INSTALL_SECONDS = 120, 300


def chromium() -> str:
    """The browser's program: `CHROMIUM` from the environment, else Debian's; "" if there is none."""
    named = os.environ.get("CHROMIUM", "")
    return next(filter(None, map(shutil.which, [named] if named else PROGRAMS)), "")


def install() -> None:
    """Has apt install the browser and fonts for every script, if this user may; says nothing, never fails."""
    prefix = _root()
    if prefix is None or not shutil.which("apt-get"):
        return
    packages = ["install", "-y", "--no-install-recommends", *PACKAGES]
    if not _quiet([*prefix, "apt-get", *packages], INSTALL_SECONDS):
        _quiet([*prefix, "apt-get", "update"], UPDATE_SECONDS)
        _quiet([*prefix, "apt-get", *packages], INSTALL_SECONDS)


def _root() -> list[str] | None:
    """What goes before a command to run it as root; None if this user may not."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    return [sudo, "-n"] if sudo and _quiet([sudo, "-n", "true"], 10) else None


def _quiet(argv: Sequence[str], seconds: float) -> bool:
    """Whether the command succeeds within the time."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main() -> int:
    """The command; always 0."""
    if not chromium() and not os.environ.get("CHROMIUM"):
        print("browser: no Chromium here; asking apt for it", flush=True)
        install()
    if not chromium():
        print(LEFT_OUT, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
