"""Commands to workers, and the operations that send them."""
