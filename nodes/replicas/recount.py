"""R4.42, R4.43: counts of requests that nobody will ever release.

The reference cannot know who still counts and sets an idle-looking replica to zero. Here `in_flight` is the
sum of what web processes carry (`statements.py`), each of which keeps its own share true. So a count leaks
only if a share goes without being subtracted: a process's row that is deleted past the liveness pass takes
its shares along. Then the sum, taken under the row's lock, is the truth, and no engine needs to be asked.
"""

from django.db import connection, transaction

from nodes.replicas import statements


def recount() -> int:
    """Sets the counts that are not the sum of their shares; answers how many. Two statements."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statements.LOCK_MISCOUNTED)
        ids = [id for (id,) in cursor.fetchall()]
        if not ids:
            return 0
        cursor.execute(statements.RECOUNT, {"ids": ids})
        return int(cursor.rowcount)
