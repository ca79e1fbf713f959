"""`make demo`: the example request against a running or temporary cluster, with its figures checked."""
