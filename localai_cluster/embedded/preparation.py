"""The process that checks the settings before the servers start and prepares the database after."""

import subprocess
import sys
from collections.abc import Mapping

from localai_cluster.embedded.resources import SetupError
from localai_cluster.kit import processes

CHECKED = "checked"
"""The line of the process that says: the settings are right."""
PASSWORD_CHANGED = "user 'admin' has another password than the settings say"
"""The line of `bootstrap` that says: the initial password lets nobody in any more."""
COMMAND_SECONDS = 300.0


class Preparation:
    """`localai_cluster.embedded.prepare` as a child. It waits in between for a line on its standard input."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._child = processes.spawn(
            [sys.executable, "-m", "localai_cluster.embedded.prepare"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def wait_checked(self) -> None:
        """Wait until it has checked the settings; `SetupError` if one is wrong."""
        assert self._child.stdout
        lines = []
        for line in self._child.stdout:
            if line.decode(errors="replace").strip() == CHECKED:
                return
            lines.append(line.decode(errors="replace"))
        self._child.wait()
        raise _failure("".join(lines))

    def finish(self) -> str:
        """Have it prepare the database; return what it printed. `SetupError` if it fails."""
        try:
            output = self._child.communicate(b"\n", COMMAND_SECONDS)[0].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            processes.end_child(self._child, processes.group_of(self._child.pid))
            raise SetupError(
                f"The migration took longer than {COMMAND_SECONDS:.0f} s.", "See what blocks the database."
            ) from None
        if self._child.returncode:
            raise _failure(output)
        return output

    def close(self) -> None:
        """End it if it still waits."""
        if self._child.poll() is None:
            processes.end_child(self._child, processes.group_of(self._child.pid))
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe
            pipe.close()


def _failure(output: str) -> SetupError:
    return SetupError(
        (output.strip().splitlines() or ["The database cannot be prepared."])[-1], "Then run again."
    )
