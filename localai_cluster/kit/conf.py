"""The settings of this server process, as in `conf.cluster().model_load_wait`; `settings.py` loads them."""

import os
from collections.abc import Mapping

from django.conf import settings

from localai_cluster.kit.env import Environment
from localai_cluster.kit.settings_table import ClusterSettings


def load(values: Mapping[str, str] = os.environ) -> tuple[ClusterSettings, Environment]:
    """Read every setting; return the settings and the environment view, which holds the problems."""
    environment = Environment(values)
    return environment.read(ClusterSettings), environment


def cluster() -> ClusterSettings:
    """Return the settings of this process."""
    try:
        # Where Django keeps a setting after its first use; its own way there takes three times as long.
        current: ClusterSettings = object.__getattribute__(settings, "CLUSTER")
    except AttributeError:
        current = settings.CLUSTER
    return current
