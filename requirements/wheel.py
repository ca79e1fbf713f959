"""What hatchling puts into the wheel beside the packages: templates, pages, gRPC stubs, the worker's lock.

Only for a wheel that is handed out (`make package`): a working copy serves its own files from where they are.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUNDLED = "localai_cluster/bundled"
FOLDERS = {
    "templates": "templates",
    "static/site": "static/site",
    "static/dist": "static/dist",
    "requirements/worker.txt": "worker.txt",
}
"""By source, the name there. `worker.txt` has the hashes of what the worker needs, for joining machines."""
NEEDED = {
    "static/dist/manifest.json": "the pages are not built: run `make ui`",
    "localai_cluster/rpc/generated/backend_pb2_grpc.py": "the gRPC stubs are not built: run `make install`",
}


class Wheel(BuildHookInterface[Any]):
    """Adds the folders under `localai_cluster/bundled`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Refuses to build a wheel without its generated parts."""
        if version == "editable":
            return
        for path, problem in NEEDED.items():
            if not (Path(self.root) / path).exists():
                raise FileNotFoundError(problem)
        for source, target in FOLDERS.items():
            build_data["force_include"][source] = f"{BUNDLED}/{target}"
