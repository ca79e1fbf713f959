"""Installs one lock file with pip and shows the progress: `python requirements/progress.py LOCK`.

pip prints each package that it downloads, but nothing while it unpacks them, so we count the packages in
site-packages. A terminal shows one line that is rewritten; elsewhere every tenth package is a line, and while
one takes long, every ten seconds. Uses only
the standard library, because nothing is installed yet.
"""

import os
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from pathlib import Path

LOOK_EVERY = 0.2
LINE_EVERY = 10
SILENT_LOOKS = 50
"""The most looks without a line while pip unpacks: ten seconds."""
LAST_LINES = 30
FETCHING, FETCHED_ALL = ("Collecting ", "Requirement already satisfied"), "Installing collected packages: "


class Progress:
    """The progress of pip, from its output."""

    def __init__(self, lock: str) -> None:
        self.lock = lock
        self.total = sum("==" in line for line in Path(lock).read_text(encoding="utf-8").splitlines())
        self.said: deque[str] = deque(maxlen=LAST_LINES)
        self._fetched = self._unpacking = self._before = 0
        self._terminal = sys.stdout.isatty()
        self._shown = self._looks = 0

    def hear(self, line: str) -> None:
        """Reads one line of pip's output and prints the progress."""
        self.said.append(line)
        if line.startswith(FETCHING):
            self._fetched += 1
            last = self._fetched % LINE_EVERY == 0 or self._fetched == self.total
            self.say(f"downloading package {self._fetched} of {self.total}", passing=not last)
        elif line.startswith(FETCHED_ALL):
            self._before, self._unpacking = installed(), line.count(",") + 1
            self.say(f"unpacking {self._unpacking} packages")

    def look(self) -> None:
        """Prints how many packages pip has unpacked."""
        if self._unpacking:
            done = min(max(installed() - self._before, 0), self._unpacking)
            self._looks += 1
            due = done - self._shown >= LINE_EVERY or self._looks >= SILENT_LOOKS
            if due:
                self._shown, self._looks = done, 0
            self.say(f"unpacking package {done} of {self._unpacking}", passing=not due)

    def say(self, text: str, *, passing: bool = False) -> None:
        """Rewrites the line on a terminal; elsewhere prints a line, unless it is only `passing`."""
        if self._terminal or not passing:
            end = "\x1b[K\r" if self._terminal else "\n"
            sys.stdout.write(f"make: {self.lock}: {text}{end}")
            sys.stdout.flush()


def installed() -> int:
    """The number of packages in this environment."""
    return sum(name.endswith(".dist-info") for name in os.listdir(sysconfig.get_path("purelib")))


def watch(progress: Progress, ended: threading.Event) -> None:
    """Updates the progress until `ended`."""
    while not ended.wait(LOOK_EVERY):
        progress.look()


def main(lock: str) -> int:
    """Runs pip; returns its exit code and prints its last lines if it fails."""
    progress, ended = Progress(lock), threading.Event()
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    pip = subprocess.Popen(
        [*command, "--require-hashes", "--no-deps", "-r", lock],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    threading.Thread(target=watch, args=(progress, ended), daemon=True).start()
    assert pip.stdout
    for line in pip.stdout:
        progress.hear(line.rstrip())
    code = pip.wait()
    ended.set()
    sys.stdout.write("\x1b[K" if sys.stdout.isatty() else "")
    if code:
        sys.stderr.write("".join(f"{line}\n" for line in progress.said))
    else:
        sys.stdout.write(f"make: installed the {progress.total} packages of {lock}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
