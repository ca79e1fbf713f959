"""The fleet: which machines there are, where models may go, and how requests get there."""
