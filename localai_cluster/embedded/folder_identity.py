"""Recognises a data folder that was copied from another one.

`cp -a` of a data folder, of a running cluster too, copies everything that the cluster is known by: its keys,
the process ids of its servers, the rows of its nodes. So a file in the folder names the folder that it was
written for, by device and inode. Device numbers may change with a reboot, inodes do not.
"""

import json
from pathlib import Path

from localai_cluster.embedded.resources import write_private

FILE = "folder.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def folder_id(folder: Path) -> str:
    """Return the device and inode of `folder`: no other folder of this machine has both."""
    found = folder.stat()
    return f"{found.st_dev:x}.{found.st_ino:x}"


def is_copy(folder: Path) -> bool:
    """Return True if `folder` was claimed as another folder than it is."""
    try:
        claimed = json.loads((folder / FILE).read_text(encoding="utf-8"))
        device, inode = str(claimed["folder"]).split(".")
        boot = claimed["boot"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # an earlier version wrote no file
    own_device, own_inode = folder_id(folder).split(".")
    return inode != own_inode or (device != own_device and boot == _boot_id())


def claim(folder: Path) -> None:
    """Record that the content of `folder` belongs to this folder."""
    write_private(folder / FILE, json.dumps({"folder": folder_id(folder), "boot": _boot_id()}) + "\n")


def _boot_id() -> str:
    try:
        return _BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
