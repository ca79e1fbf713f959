"""Tests of the checks, the sweep and the build: run by `make check`, not by `make test`."""
