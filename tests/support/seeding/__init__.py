"""A fleet that exists in the database only: nodes that beat and operations that move, as in life.

`python -m tests.support.seeding --nodes 300 --operations 200 --seconds 60` writes to `DATABASE_URL`. For
pictures, figures and tests of pages; no worker stands behind a seeded node, so run no task cluster beside it
for longer than a minute: what falls silent is declared so.
"""
