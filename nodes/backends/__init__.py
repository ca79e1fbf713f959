"""Commands to workers, and the operations made of them."""
