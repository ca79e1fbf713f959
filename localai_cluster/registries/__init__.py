"""Container registries: references of images, credentials, and the client that reads manifests and layers.

The worker installs images with it; a controller reads their digests for the upgrade check.
"""
