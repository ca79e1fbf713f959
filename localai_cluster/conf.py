"""The product's own settings, typed.

`conf.cluster().model_load_wait` instead of a string on django.conf.settings.
"""

from django.conf import settings

from localai_cluster.cluster_settings import ClusterSettings


def cluster() -> ClusterSettings:
    """The settings of this process."""
    found: ClusterSettings = settings.CLUSTER
    return found
