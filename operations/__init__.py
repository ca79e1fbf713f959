"""The ledger: durable, leased, observable units of work. Knows no node beyond an id."""
