"""What runs again and again for the ledger."""
