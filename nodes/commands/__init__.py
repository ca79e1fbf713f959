"""Commands to workers over the bus: requests, replies as outcomes, and progress reports."""
