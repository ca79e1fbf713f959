"""Executor of operations: claim, run the handler of the kind, renew the lease, record the outcome."""
