"""Recurring tasks of the ledger."""
