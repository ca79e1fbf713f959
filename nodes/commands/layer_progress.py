"""One rising percentage from a stock worker's reports, which restart with each layer of an image. Pure.

Its `total` is that of all layers and its `current` that of the present one (contract/nats.md §4.3). The bytes
of the earlier layers are added.
"""

import re
from dataclasses import dataclass, replace

from localai_cluster.messaging.messages import ProgressEvent

_LAYER = re.compile(r"Downloading (\d{1,4})/(\d{1,4}) ")
_EXTRACTING = "Extracting "


@dataclass
class Layers:
    """The reports of one command, in the order of their arrival."""

    _before: float = 0.0
    _layer: int = 0
    _reached: float = 0.0
    _shown: float = 0.0

    def whole(self, event: ProgressEvent) -> ProgressEvent:
        """Return the event with the percentage of all layers, which never falls. Ours stay unchanged."""
        if event.seq:
            return event
        reported = min(max(event.percentage, 0.0), 100.0)
        if event.file_name.startswith(_EXTRACTING):
            # Extraction counts from 0 again after the download is complete.
            self._shown = max(self._shown, reported)
            return replace(event, phase="extracting", percentage=self._shown)
        match = _LAYER.match(event.file_name)
        layer = int(match[1]) if match else self._layer
        if layer > self._layer:
            self._before, self._reached, self._layer = self._before + self._reached, 0.0, layer
        if layer == self._layer:
            self._reached = max(self._reached, reported)
        self._shown = max(self._shown, min(self._before + self._reached, 100.0))
        return replace(event, percentage=self._shown)
