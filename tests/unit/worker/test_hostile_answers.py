"""What a server, or another program at its address, may answer to a worker: any status, any body."""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from localai_cluster.messaging.servers import Servers
from localai_cluster.worker.control_plane import MAX_RESPONSE_BYTES, CallFailed, ControlPlane, ServerKind
from localai_cluster.worker.identity import NodeIdentity
from localai_cluster.worker.registration import BusCredentials
from tests.support.effort import EFFORT

FIELDS = (
    "id",
    "status",
    "fingerprint",
    "nats_jwt",
    "nats_user_seed",
    "nats_url",
    "error",
    "message",
    "type",
    "rotate",
    "in_flight",
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**300, 10**301),
    st.floats(allow_nan=True),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["pending", "healthy", "node_error", "nats://n:4222", "x" * 100_000, "\x00"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=12,
)
BODIES = st.one_of(
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(FIELDS), VALUES).map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=40),
    st.sampled_from([b"[" * 100_000, b'{"id":' * 5_000, b"\xff\xfe", b'{"id":"n"', b"<html>"]),
)
STATUSES = st.sampled_from([200, 201, 204, 301, 400, 401, 403, 404, 409, 413, 429, 500, 503])
HEADERS = st.fixed_dictionaries(
    {}, optional={"Retry-After": st.sampled_from(["0", "7", "99999999999", "-1", "soon", "1e9"])}
)
CALLS: dict[str, tuple[Any, ...]] = {
    "register": ({},),
    "heartbeat": ("n", {}),
    "in_flight": ("n",),
    "drain": ("n",),
    "deregister": ("n",),
    "knows_secrets": (),
    "accepts_token": (ServerKind.CLUSTER,),
}
Answers = list[tuple[int, dict[str, str], bytes]]


class Bus:
    """Notes nothing: what is dialled is not asked here."""

    connected = False

    def use(self, servers: Servers | None) -> None:
        """Take them."""


def control_plane(folder: Path, answers: Answers) -> ControlPlane:
    """One whose server gives these answers in turn, the last one for ever."""
    left = list(answers)

    def respond(request: httpx.Request) -> httpx.Response:
        status, headers, body = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))

    client = httpx.AsyncClient(transport=httpx.MockTransport(respond))
    return ControlPlane("http://c", "tok", NodeIdentity(folder), "1f" * 16, client)


@pytest.mark.rule("worker-5.1", "worker-5.2", "worker-6", "nats-9.3")
@given(answers=st.lists(st.tuples(STATUSES, HEADERS, BODIES), min_size=1, max_size=4))
@example(answers=[(201, {}, b'{"id": "' + b"n" * 100_000 + b'"}')])
@example(answers=[(200, {}, b'[{"in_flight": 1' + b"0" * 5_000 + b"}]")])
@example(answers=[(500, {}, b'{"error": "one\\nline\\u0000"}')])
@settings(max_examples=30 * EFFORT, suppress_health_check=[HealthCheck.too_slow])
async def test_any_answer_is_a_result_or_one_clear_error(answers: Answers) -> None:
    """No call fails otherwise, waits longer than told, leaks the secret, or changes it without a success."""
    for name, arguments in CALLS.items():
        with tempfile.TemporaryDirectory() as folder:
            plane = control_plane(Path(folder), answers)
            secret = NodeIdentity(Path(folder)).secret
            try:
                result = await getattr(plane, name)(*arguments)
            except CallFailed as error:
                result = error
            if isinstance(result, CallFailed):
                assert 0 < len(result.message) < 1000
                assert result.message.isprintable()
                assert secret not in result.message
                assert 0 <= result.wait <= 60
            elif name == "register":
                assert 0 < len(result.node_id) <= 255
                BusCredentials(Bus(), None, None, None).adopt(result)  # type: ignore[arg-type]
            elif name == "in_flight":
                assert isinstance(result, int)
            has_rotated = NodeIdentity(Path(folder)).secret != secret
            assert not has_rotated or any(status < 300 for status, _, _ in answers)


async def test_an_answer_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    """As many bytes as a control plane has to say, and no more."""
    sent = 0

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            nonlocal sent
            while True:
                sent += 100_000
                yield b" " * 100_000
                await asyncio.sleep(0)

    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Endless())))
    plane = ControlPlane("http://c", "tok", NodeIdentity(tmp_path), "1f" * 16, client)
    with pytest.raises(CallFailed, match="answers with more than"):
        await plane.heartbeat("n", {})
    assert sent <= MAX_RESPONSE_BYTES + 200_000
