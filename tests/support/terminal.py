"""A terminal, or a file, that a command writes to, and what happens when a text appears on it."""

from collections.abc import Callable
from io import StringIO


class Screen(StringIO):
    """Takes what a command prints; each step happens once, right after its text has appeared, in order."""

    def __init__(self, *steps: tuple[str, Callable[[], object]], terminal: bool = False) -> None:
        super().__init__()
        self._steps, self._terminal, self._seen = list(steps), terminal, 0

    def isatty(self) -> bool:
        """As asked for."""
        return self._terminal

    def write(self, text: str) -> int:
        """Prints; a step sees rows as they are, and may end the command."""
        written = super().write(text)
        whole = self.getvalue()
        if self._steps and (at := whole.find(self._steps[0][0], self._seen)) >= 0:
            awaited, step = self._steps.pop(0)
            self._seen = at + len(awaited)
            step()
        return written

    @property
    def left(self) -> list[str]:
        """Texts that have not appeared."""
        return [text for text, _ in self._steps]
