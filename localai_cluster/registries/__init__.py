"""Container registries: image references, credentials, and a client for manifests and layers.

The worker installs images with the client; a controller reads image digests for the upgrade check.
"""
