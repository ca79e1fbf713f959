"""The rows of replicas: where one is loaded, reserved or being removed."""
