"""Shared code of HTTP, websockets and the API document; it has no tables."""
