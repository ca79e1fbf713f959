"""All state changes of operations, as short transactions."""
