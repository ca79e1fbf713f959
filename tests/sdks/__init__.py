"""Clients that others wrote, each in its own installation, against this process's edge (`make sweep`)."""
