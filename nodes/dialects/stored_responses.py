"""The store of `/v1/responses`: create with `store` and `previous_response_id`, show, delete.

The store is off by default (`CLUSTER_RESPONSE_RETENTION`). Each API key has its own responses; sessions and
callers without a key have none. A row has the items of a request and its response and refers to the response
that it continues, so a conversation is a chain of rows. A row that was not used for the retention time is not
found any more and is deleted. If a key has too many rows, its least recently used rows are deleted.

A request that stores nothing and refers to nothing needs no statement. References need one statement before
the pick, a stored response needs one transaction before its last event. If the transaction fails, the
response says `store: false`.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

import msgspec
import orjson
import psycopg

from localai_cluster.kit import clock, conf, database_pool, names, outage
from localai_cluster.kit.errors import InvalidInput, NotFound, Unavailable
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, ResponseBody
from nodes.dialects import blocks, responses
from nodes.dialects.openai_common import MAX_BODY_BYTES
from nodes.dialects.openai_messages import MAX_MESSAGES
from nodes.dialects.responses_input import NO_STORED_ITEMS, StoredItems
from nodes.gateway import streams
from nodes.gateway.endpoint import confirm
from nodes.gateway.generation import Head, TextDelta
from nodes.gateway.request import InferenceRequest
from nodes.gateway.streams import EventStream

logger = logging.getLogger(__name__)

MAX_RESPONSES_PER_KEY = 10_000
"""Maximum number of stored responses of one API key."""
MAX_CHAIN_LENGTH = 1000
"""Maximum number of stored responses in one conversation."""
RENEWAL_FRACTION = 0.1
"""Fraction of the retention that must pass before another use of a response is recorded."""
_ROW_OVERHEAD_BYTES = 300
"""Estimated bytes of a row without its contents, with its index entries."""
_ID_PREFIX = "resp_"
_VISIBLE_ROW_SQL = "r.owner = %(owner)s AND r.used_at >= %(since)s"
# A chain ends with its first response, at a gap, or with the first row that makes it too large, whose
# contents are not read. Responses that items are taken from come with it, the newest as far as they fit.
_LOAD_SQL = f"""
WITH RECURSIVE chain AS (
    SELECT r.id, r.previous_id, r.size::bigint AS total, 1 AS depth
    FROM stored_responses r WHERE r.id = %(previous)s AND {_VISIBLE_ROW_SQL}
  UNION ALL
    SELECT r.id, r.previous_id, chain.total + r.size, chain.depth + 1
    FROM chain JOIN stored_responses r ON r.id = chain.previous_id AND {_VISIBLE_ROW_SQL}
    WHERE chain.total <= %(bytes)s AND chain.depth < %(rows)s
), named AS (
    SELECT r.id, sum(r.size) OVER (ORDER BY r.created_at DESC, r.id) AS total
    FROM stored_responses r WHERE r.id = ANY(%(named)s) AND {_VISIBLE_ROW_SQL}
)
SELECT chain.depth, r.id, r.previous_id,
    CASE WHEN chain.total <= %(bytes)s THEN r.input END, CASE WHEN chain.total <= %(bytes)s THEN r.output END
FROM chain JOIN stored_responses r USING (id)
UNION ALL
SELECT 0, r.id, '', NULL, r.output FROM named JOIN stored_responses r USING (id)
WHERE named.total <= %(bytes)s
ORDER BY 1 DESC
"""
_ADD_SQL = """
INSERT INTO stored_responses
    (id, owner, previous_id, created_at, used_at, size, input, output, response)
VALUES (%(id)s, %(owner)s, %(previous)s, %(now)s, %(now)s, %(size)s, %(input)s, %(output)s, %(response)s)
"""
# Rows that another process renews or deletes meanwhile are left to it.
_RENEW_SQL = """
UPDATE stored_responses SET used_at = %(now)s WHERE id IN (
    SELECT id FROM stored_responses
    WHERE id = ANY(%(used_ids)s) AND owner = %(owner)s AND used_at < %(renewed)s
    ORDER BY id FOR UPDATE SKIP LOCKED
)
"""
_SHRINK_SQL = """
DELETE FROM stored_responses WHERE id IN (
    SELECT id FROM stored_responses WHERE id IN (
        SELECT id FROM (
            SELECT id, sum(size) OVER newest AS total, row_number() OVER newest AS place
            FROM stored_responses WHERE owner = %(owner)s
            WINDOW newest AS (ORDER BY used_at DESC, created_at DESC, id)
        ) ranked WHERE total > %(space)s OR place > %(most)s
    ) ORDER BY id FOR UPDATE SKIP LOCKED
)
"""
_SHOW_SQL = f"SELECT r.response, r.output FROM stored_responses r WHERE r.id = %(id)s AND {_VISIBLE_ROW_SQL}"
_DELETE_SQL = f"DELETE FROM stored_responses r WHERE r.id = %(id)s AND {_VISIBLE_ROW_SQL}"


class DeletedResponse(ResponseBody, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


@dataclass(frozen=True)
class CallerStore:
    """Access to the stored responses of one API key."""

    owner: str
    retention: timedelta

    @classmethod
    def of(cls, request: InferenceRequest) -> "CallerStore | None":
        """Return the store for the caller of this request; None if the caller's responses are not stored."""
        retention = conf.cluster().response_retention
        return (
            cls(request.key_owner, timedelta(seconds=retention)) if retention and request.key_owner else None
        )

    def parameters(self, now: datetime, **others: Any) -> Mapping[str, Any]:
        """Return the parameters of a SQL statement about this key's responses."""
        return {"owner": self.owner, "since": now - self.retention, "now": now, **others}

    async def load(self, fields: Mapping[str, Any]) -> StoredItems:
        """Return the stored items to which the request refers; run no statement without references."""
        previous, references = fields.get("previous_response_id"), _referenced_ids(fields.get("input"))
        previous = previous if isinstance(previous, str) else ""
        # An item's id begins with that of its response.
        named = {f"{_ID_PREFIX}{parts[1]}" for name in references if len(parts := name.split("_")) == 3}
        named = {name for name in named if _is_possible_id(name)}
        if previous and not _is_possible_id(previous):
            _check_chain(previous, ())
        if not previous and not named:
            return StoredItems(has_store=True)
        parameters = self.parameters(
            clock.now(), previous=previous, named=sorted(named), bytes=MAX_BODY_BYTES, rows=MAX_CHAIN_LENGTH
        )
        with outage.unavailable_on(*database_pool.UNREACHABLE_ERRORS):
            rows = await database_pool.shared().fetch_rows(_LOAD_SQL, parameters)
        chain = [row[1:] for row in rows if row[0]]
        if previous:
            _check_chain(previous, chain)
        output = [item for row in rows if not row[0] for item in orjson.loads(row[4])]
        by_id = {item["id"]: item for item in output if item["id"] in references}
        items = [
            item
            for _, _, input_items, output_items in chain
            for item in (*orjson.loads(input_items), *orjson.loads(output_items))
        ]
        used = tuple(sorted({row[1] for row in rows}))
        return StoredItems(has_store=True, items=items, by_id=by_id, used_ids=used)


def _referenced_ids(input_items: Any) -> set[str]:
    """Return the ids in the references of the input."""
    if not isinstance(input_items, list):
        return set()
    ids = (
        item.get("id")
        for item in input_items[:MAX_MESSAGES]
        if isinstance(item, dict) and item.get("type") == "item_reference"
    )
    return {name for name in ids if isinstance(name, str)}


def _is_possible_id(text: str) -> bool:
    """Return True if a stored response may have this id. PostgreSQL rejects NUL in a text."""
    return not names.find_unprintable(text)


def _check_chain(previous: str, chain: Sequence[tuple[Any, ...]]) -> None:
    """Raise InvalidInput if the stored conversation is incomplete. The first row is the oldest response."""
    if not chain:
        message = f"Previous response with id '{previous[:100]}' not found."
    elif chain[0][2] is None or (chain[0][1] and len(chain) >= MAX_CHAIN_LENGTH):
        message = "the conversation has become too long; send what matters of it as `input`"
    elif chain[0][1]:
        message = f"an earlier response of the conversation, '{chain[0][1]}', is no longer stored"
    else:
        return
    error = InvalidInput(message, field="previous_response_id")
    error.code = "previous_response_not_found"
    raise error


@dataclass
class ResponseRecord:
    """The parts of a request that are stored together with its response."""

    store: CallerStore
    input: bytes
    used_ids: Sequence[str]
    echo: dict[str, Any] = field(default_factory=dict)
    """Fields of the request that the response repeats. `store` becomes false if storing fails."""

    async def store_response(self, head: Head, deltas: Sequence[TextDelta]) -> None:
        """Store the complete response. A failure is logged, not raised."""
        response = responses.final_response(head, blocks.collect_blocks(deltas), deltas[-1])
        output = wire.encode(response.pop("output"))
        response_json = wire.encode(response)
        size = _ROW_OVERHEAD_BYTES + len(self.input) + len(output) + len(response_json)
        now, space = clock.now(), conf.cluster().response_storage_limit
        if size > min(space, MAX_BODY_BYTES):
            self.echo["store"] = False
            return
        parameters = self.store.parameters(
            now,
            id=response["id"],
            previous=response["previous_response_id"] or "",
            size=size,
            input=self.input,
            output=output,
            response=response_json,
            used_ids=list(self.used_ids),
            renewed=now - self.store.retention * RENEWAL_FRACTION,
            space=space,
            most=MAX_RESPONSES_PER_KEY,
        )
        statements = (_ADD_SQL, *((_RENEW_SQL,) if self.used_ids else ()), _SHRINK_SQL)
        try:
            await database_pool.shared().run_in_transaction([(text, parameters) for text in statements])
        except (psycopg.Error, *database_pool.UNREACHABLE_ERRORS, Unavailable) as error:
            logger.warning("A response is not stored: %s", error)
            self.echo["store"] = False


def _input_items(fields: Mapping[str, Any], earlier: StoredItems) -> bytes:
    """Return the items of the request as JSON, with stored items instead of references."""
    given = fields["input"]
    if isinstance(given, str):
        return orjson.dumps([{"type": "message", "role": "user", "content": given}])
    items = (
        earlier.by_id.get(item["id"]) if item.get("type") == "item_reference" else item for item in given
    )
    return orjson.dumps([item for item in items if item is not None])


async def create(request: InferenceRequest) -> Answer | EventStream:
    """Respond to a conversation. Store the response unless the request or the operator forbids it."""
    fields = wire.parse_json_object(request.body)
    store = CallerStore.of(request)
    earlier = await store.load(fields) if store else NO_STORED_ITEMS
    generation = responses.parse_request(fields, earlier)
    store_response = None
    if store and generation.echo["store"]:
        record = ResponseRecord(store, _input_items(fields, earlier), earlier.used_ids, dict(generation.echo))
        generation, store_response = (
            msgspec.structs.replace(generation, echo=record.echo),
            record.store_response,
        )
    del fields, earlier
    # A client may choose the id of its request, but not those of a response and its items.
    head = Head(uuid.uuid4().hex, int(clock.now().timestamp()), generation)
    return await streams.respond(request, responses.DIALECT, head, store_response)


async def show(request: InferenceRequest) -> Answer:
    """Respond with the stored response in the path."""
    rows = await _run_statement(
        request, lambda parameters: database_pool.shared().fetch_rows(_SHOW_SQL, parameters)
    )
    if not rows:
        raise _not_found(request)
    response, output = rows[0]
    return Answer(wire.encode(orjson.loads(response) | {"output": msgspec.Raw(output)}))


async def delete(request: InferenceRequest) -> Answer:
    """Delete the stored response in the path. Conversations that contain it cannot be continued any more."""
    if not await _run_statement(
        request, lambda parameters: database_pool.shared().run(_DELETE_SQL, parameters)
    ):
        raise _not_found(request)
    return wire.json_answer(DeletedResponse(id=_response_id(request)))


T = TypeVar("T")


async def _run_statement(
    request: InferenceRequest, statement: Callable[[Mapping[str, Any]], Awaitable[T]]
) -> T | None:
    """Run a statement about the response in the path; return None if the caller stores no responses."""
    await confirm(request)
    store, identity = CallerStore.of(request), _response_id(request)
    if store is None or not _is_possible_id(identity):
        return None
    with outage.unavailable_on(*database_pool.UNREACHABLE_ERRORS):
        return await statement(store.parameters(clock.now(), id=identity))


def _response_id(request: InferenceRequest) -> str:
    return request.path.rpartition("/")[2]


def _not_found(request: InferenceRequest) -> NotFound:
    message = f"Response with id '{names.to_single_line(_response_id(request)[:100])}' not found."
    if CallerStore.of(request) is None:
        message += " This cluster stores no responses for this caller (CLUSTER_RESPONSE_RETENTION)."
    return NotFound(message, field="id")
