"""Where a replica may go: feasibility, then ranking, with the reasons kept. Pure.

A snapshot in, a decision out.
"""
