"""Sessions of processes that no longer answer: their host lost power, or they are suspended."""

import psycopg
import pytest
from django.conf import settings
from django.db import connection, transaction
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from localai_cluster.kit import clock
from operations.changes.events import conninfo, emit
from operations.models import Operation, Sequence

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_process_that_is_suspended_within_a_transaction_does_not_stop_all_others() -> None:
    """It holds the counter of all operations (architecture, rules 1 and 2); nothing closes its connection."""
    Sequence.objects.create(value=1)
    usual = str(conninfo_to_dict(conninfo())["options"])
    sooner = usual.replace(f"={settings.IDLE_TRANSACTION_SECONDS}s", "=1s")
    assert sooner != usual
    with psycopg.connect(make_conninfo(conninfo(), options=sooner)) as suspended:
        suspended.execute("UPDATE operation_sequence SET value = value + 1")
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '60s'")
            operation = Operation.objects.create(
                kind="model_load", key="k", element="m", updated_at=clock.now()
            )
            emit([operation])
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            suspended.execute("SELECT")
    assert Sequence.objects.get().value == 2


def test_either_side_notices_a_dead_peer_within_a_minute() -> None:
    """A thread waits two hours for the reply of a dead server, as locks do for the end of a dead client."""
    parameters = conninfo_to_dict(conninfo())
    ours = [int(str(parameters[f"keepalives_{name}"])) for name in ("idle", "interval", "count")]
    options = dict(word.split("=") for word in str(parameters["options"]).split() if "=" in word)
    servers = [int(options[f"tcp_keepalives_{name}"]) for name in ("idle", "interval", "count")]
    for idle, interval, count in (ours, servers):
        assert 0 < idle + interval * count <= 60
    assert 0 < int(str(parameters["tcp_user_timeout"])) <= 60_000
