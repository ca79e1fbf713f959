"""A terminal, or a file, that a command writes to, with actions when a text appears."""

from collections.abc import Callable
from io import StringIO


class Screen(StringIO):
    """Receives the output of a command; each step runs once, in order, right after its text has appeared."""

    def __init__(self, *steps: tuple[str, Callable[[], object]], terminal: bool = False) -> None:
        super().__init__()
        self._steps, self._terminal, self._seen = list(steps), terminal, 0

    def isatty(self) -> bool:
        """Return the value that the test has set."""
        return self._terminal

    def write(self, text: str) -> int:
        """Print; a step may read rows and end the command."""
        written = super().write(text)
        whole = self.getvalue()
        if self._steps and (at := whole.find(self._steps[0][0], self._seen)) >= 0:
            awaited, step = self._steps.pop(0)
            self._seen = at + len(awaited)
            step()
        return written

    @property
    def left(self) -> list[str]:
        """Return the texts that have not appeared."""
        return [text for text, _ in self._steps]
