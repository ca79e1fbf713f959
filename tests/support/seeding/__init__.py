"""A fleet that exists in the database only: nodes that send heartbeats, and operations that progress.

`python -m tests.support.seeding --nodes 300 --operations 200 --seconds 60` writes to `DATABASE_URL`. For
pictures, figures and tests of pages. A seeded node has no worker, so run no task process in parallel for
longer than a minute: it would declare the nodes silent.
"""
