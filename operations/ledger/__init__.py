"""Every write to an operation that means something, as short transactions."""
