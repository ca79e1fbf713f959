"""The product's own settings, typed.

`conf.cluster().model_load_wait` instead of a string on django.conf.settings.
"""

from django.conf import settings

from localai_cluster.kit.cluster_settings import ClusterSettings


def cluster() -> ClusterSettings:
    """Return the settings of this process."""
    settings_: ClusterSettings = settings.CLUSTER
    return settings_
