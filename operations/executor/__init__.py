"""Carries operations out: claim, run the handler of the kind, keep the lease, record the outcome."""
