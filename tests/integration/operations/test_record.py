"""The record of operations by REST: filters, pages, export (`contract/http-api.md` §3.6)."""

import base64
import csv
import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID, uuid4

import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.api_document import document
from operations.api import history
from operations.models import Operation, OperationTarget
from tests.integration.api.test_document import fits
from tests.support import api

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
RECORD, EXPORT = "/api/operations/history", "/api/operations/history/export"


def ended(minutes: int = 0, outcome: str = "completed", *names: str, **more: Any) -> Operation:
    """An operation that ended so many minutes after ten, with a part on each of these nodes."""
    at = NOW + timedelta(minutes=minutes)
    columns = {"kind": "backend_install", "element": "local@echo", "actor": "ann", "key": str(uuid4())} | more
    if outcome == "failed":
        columns = {"error": "disk full", "dismissed_at": at, "dismissed_by": "bob"} | columns
    operation = Operation.objects.create(status=outcome, finished_at=at, created_at=NOW, **columns)
    for name in names:
        OperationTarget.objects.create(
            operation=operation, node_id=node_id(name), node_name=name, status="success"
        )
    return operation


def node_id(name: str) -> UUID:
    return UUID(int=int.from_bytes(name.encode()))


def record(**query: Any) -> Any:
    answer = api.admin().get(f"{RECORD}?{urlencode(query)}")
    assert answer.status_code == 200, answer.content
    shape = document()["paths"][RECORD]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert fits(shape, answer.json()) == []
    return answer.json()


def jobs(page: Any) -> list[str]:
    return [entry["jobID"] for entry in page["operations"]]


def ids(*operations: Operation) -> list[str]:
    return [str(one.id) for one in operations]


@pytest.mark.rule("http-3.6", "O94", "O96", "O100")
def test_the_record_has_what_ended_last_first_and_no_undismissed_failure() -> None:
    done = ended(1, "completed", started_at=NOW, key="node:x:echo")
    called_off, dismissed = ended(3, "cancelled"), ended(2, "failed", kind="backend_delete")
    ended(4, "failed", dismissed_at=None)
    page = record()
    assert (jobs(page), "nextCursor" in page) == (ids(called_off, dismissed, done), False)
    cancelled, failed, first = page["operations"]
    assert (failed["outcome"], failed["error"], failed["taskType"]) == ("failed", "disk full", "deletion")
    assert ("error" in cancelled, cancelled["outcome"], cancelled["taskType"]) == (
        False,
        "cancelled",
        "installation",
    )
    assert (first["id"], first["name"], first["isBackend"]) == ("node:x:echo", "echo", True)
    assert (first["startedAt"], first["finishedAt"]) == (
        "2026-08-22T10:00:00+00:00",
        "2026-08-22T10:01:00+00:00",
    )
    assert "nodeID" not in first


@pytest.mark.rule("http-3.6", "O100")
@pytest.mark.parametrize("path", [RECORD, EXPORT])
def test_filters_narrow_the_record_and_its_export_in_the_same_way(path: str) -> None:
    whole = ended(1, "completed", "a", "b")
    one = ended(2, "failed", "b", kind="backend_delete", actor="bob", element="minilm")
    model = ended(3, "cancelled", kind="model_load", element="m", node_id=node_id("a"), node_name="a")

    def found(**query: Any) -> list[str]:
        if path == RECORD:
            return jobs(record(**query))
        return [json.loads(line)["jobID"] for line in exported(**query).splitlines()]

    assert found() == ids(model, one, whole)
    assert found(node=node_id("a")) == ids(model, whole)
    assert found(node=node_id("b")) == ids(one, whole)
    assert found(backend="echo") == found(backend="local@echo") == ids(whole)
    assert found(kind="model_load") == ids(model)
    assert found(outcome="failed") == found(actor="bob") == ids(one)
    assert found(**{"from": "2026-08-22T10:02:00Z"}) == ids(model, one)
    assert found(to="2026-08-22T10:02:00Z") == ids(one, whole)
    assert found(backend="cho") == found(node=uuid4()) == []


@pytest.mark.rule("http-3.6")
@pytest.mark.parametrize("path", [RECORD, EXPORT, "/api/operations/inbox"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("node", "nope"),
        ("outcome", "fine"),
        ("from", "yesterday"),
        ("actor", "x" * 151),
        ("backend", "\0"),
        ("limit", "0"),
        ("limit", "501"),
        ("cursor", "x"),
        ("format", "xml"),
        ("surprise", "1"),
    ],
)
def test_a_parameter_that_cannot_be_is_named(path: str, name: str, value: str) -> None:
    answer = api.admin().get(f"{path}?{urlencode({name: value})}")
    assert (answer.status_code, answer.json()["field"]) == (400, name)


@pytest.mark.parametrize("at", ["2026-01-01T00:00:00+23:59", "0001-01-01T00:00:00+14:00"])
@pytest.mark.parametrize("path", [RECORD, "/api/operations/inbox"])
def test_a_cursor_with_an_unusual_time_is_no_crash(path: str, at: str) -> None:
    """PostgreSQL refuses offsets of 16 hours or more: it was a 500."""
    cursor = base64.urlsafe_b64encode(f"{at} {uuid4()}".encode()).decode()
    assert api.admin().get(f"{path}?{urlencode({'cursor': cursor})}").status_code in (200, 400)


@pytest.mark.rule("http-3.6")
def test_pages_stay_right_while_operations_end() -> None:
    """By position in the order; those of one moment too."""
    rows = sorted((ended() for _ in range(5)), key=lambda row: row.id, reverse=True)
    first = record(limit=2)
    late = ended(1)
    second = record(limit=2, cursor=first["nextCursor"])
    third = record(limit=2, cursor=second["nextCursor"])
    assert jobs(first) + jobs(second) + jobs(third) == ids(*rows)
    assert "nextCursor" not in third
    assert jobs(record(limit=1)) == ids(late)


@pytest.mark.rule("http-3.6")
def test_a_page_costs_the_same_for_many_operations_and_parts() -> None:
    def costs() -> int:
        with CaptureQueriesContext(connection) as seen:
            record()
        return len(seen)

    ended(1, "completed", "a")
    few = costs()
    for minute in range(10):
        ended(minute, "completed", "a", "b", "c")
    assert costs() == few


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-3.6", "O100")
def test_pages_and_chunks_are_short_where_operations_have_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part is left out: an operation with more parts than fit is a page by itself."""
    monkeypatch.setattr(history, "MAX_TARGETS", 3)
    rows = [ended(9, "completed", "a", "b"), ended(8, "completed", "a"), ended(7, "completed", "a")]
    rows += [ended(6, "completed", "a", "b", "c", "d"), ended(5)]
    pages = [record()]
    while cursor := pages[-1].get("nextCursor"):
        pages.append(record(cursor=cursor))
    one, two, three, four, five = ids(*rows)
    assert [jobs(page) for page in pages] == [[one, two], [three], [four], [five]]
    assert len(pages[2]["operations"][0]["nodes"]) == 4
    lines = [piece.count("\n") for piece in pieces(answer_of())]
    assert lines == [2, 1, 1, 1]


@pytest.mark.rule("http-3.6", "O98")
def test_clearing_leaves_what_is_active_and_what_nobody_has_seen() -> None:
    ended(1), ended(2, "failed")
    kept = ended(3, "failed", dismissed_at=None)
    active = Operation.objects.create(kind="model_load", key="m", element="m")
    assert api.admin().delete(RECORD).json() == {"success": True}
    assert jobs(record()) == []
    assert set(Operation.objects.values_list("pk", flat=True)) == {kept.pk, active.pk}
    for credential in (api.SECRET, "wrong"):
        assert api.bearer(credential).delete(RECORD).status_code in (401, 403)


def exported(**query: Any) -> str:
    """What an export says."""
    return "".join(pieces(answer_of(**query)))


def answer_of(**query: Any) -> Any:
    answer = api.admin().get(f"{EXPORT}?{urlencode(query)}")
    assert answer.status_code == 200
    return answer


def pieces(answer: Any) -> list[str]:
    """As the server sends them."""

    async def taken() -> list[str]:
        return [piece.decode() async for piece in answer.streaming_content]

    return async_to_sync(taken)()


@pytest.mark.rule("O100")
def test_a_line_of_the_export_is_an_entry_of_the_record() -> None:
    ended(1, "completed", "a", "b"), ended(2, "failed")
    answer = answer_of()
    assert [json.loads(line) for line in "".join(pieces(answer)).splitlines()] == record()["operations"]
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="operations.ndjson"'
    assert "no-store" in answer.headers["Cache-Control"]


@pytest.mark.rule("O100")
def test_csv_has_a_line_an_operation_and_nothing_that_calculates() -> None:
    """Texts of workers and of people may hold separators, lines and formulas."""
    ended(1, "completed", "a", "b")
    ended(2, "failed", "b", error='=1+1\n"x", y', dismissed_comment="@me", actor="-ann")
    answer = answer_of(format="csv")
    assert answer.headers["Content-Type"].startswith("text/csv")
    failed, done = csv.DictReader(io.StringIO("".join(pieces(answer))))
    assert (failed["error"], failed["dismissedComment"], failed["actor"]) == (
        '\'=1+1\n"x", y',
        "'@me",
        "'-ann",
    )
    assert (failed["outcome"], failed["nodes"], done["nodes"]) == ("failed", "b", "a; b")
    assert (done["fullName"], done["finishedAt"]) == ("local@echo", "2026-08-22T10:01:00+00:00")
    (head,) = exported(format="csv", actor="nobody").splitlines()
    assert head.split(",") == list(done)


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("O100")
@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_the_export_is_read_piece_by_piece_as_it_is_taken(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read ahead, so a long record costs no memory; all of it comes, once, with one head."""
    monkeypatch.setattr(history, "CHUNK_ENTRIES", 2)
    rows, read, real = [ended(minute) for minute in range(5)], [], history.read_after

    def after(*asked: Any) -> Any:
        read.append(asked)
        return real(*asked)

    monkeypatch.setattr(history, "read_after", after)
    answer = answer_of(format=form)
    taken: list[bytes] = []

    async def take() -> None:
        async for piece in answer.streaming_content:
            taken.append(piece)
            assert len(read) == len(taken)

    async_to_sync(take)()
    lines = [piece.count(b"\n") for piece in taken]
    assert lines == ([2, 2, 1] if form == "ndjson" else [3, 2, 1])
    assert [str(row.id) for row in rows if b"".join(taken).count(str(row.id).encode()) == 1] == ids(*rows)


@pytest.mark.rule("O100", "O107")
def test_the_export_is_for_admins() -> None:
    for credential in (api.SECRET, "wrong"):
        assert api.bearer(credential).get(EXPORT).status_code in (401, 403)
