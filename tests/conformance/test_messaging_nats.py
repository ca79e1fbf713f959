"""The NATS adapter against a real server: loss, refusal, order and bounds."""

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import (
    UNQUEUED,
    Message,
    NoResponders,
    NotConnected,
    PayloadTooLarge,
    RequestTimeout,
)
from localai_cluster.messaging.link import Link
from localai_cluster.messaging.messages import DecodeError, encode
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import parse_url
from tests.conformance.worker_support import INBOX, PASSWORD, USER, NatsServer, ask
from tests.conftest import until


async def echo(message: Message) -> bytes:
    return message.payload


@pytest.mark.rule("nats-1")
async def test_request_and_its_failures(bus: NatsBus) -> None:
    """docs/architecture.md, bus protocol: each way to get no answer is its own error."""
    await bus.subscribe("echo", echo)
    assert await bus.request("echo", b"hi", 2, inbox=INBOX) == b"hi"
    with pytest.raises(NoResponders):
        await bus.request("unheard", b"", 2, inbox=INBOX)
    with pytest.raises(PayloadTooLarge):
        await bus.request("echo", b"x" * (1024 * 1024 + 1), 2, inbox=INBOX)
    release = asyncio.Event()

    async def slow(message: Message) -> None:
        await release.wait()

    await bus.subscribe("slow", slow)
    with pytest.raises(RequestTimeout):
        await bus.request("slow", b"", 0.1, inbox=INBOX)
    release.set()


@pytest.mark.parametrize(
    ("subject", "headers"),
    [(b"replies.a", b"x"), (b"replies.a", b"NATS/1.0 \xff\xff\xff\r\n\r\n"), (b"replies.\xff", b"")],
    ids=["one byte", "no text", "a subject that is no text"],
)
async def test_a_message_that_cannot_be_decoded_is_dropped_alone(
    nats: NatsServer, bus: NatsBus, subject: bytes, headers: bytes
) -> None:
    """Any worker may send one to its inbox; every later message to the controller was lost."""
    await bus.subscribe("echo", echo)
    heard: list[bytes] = []

    async def hear(message: Message) -> None:
        heard.append(message.payload)

    await bus.subscribe("replies.*", hear)
    _, writer = await asyncio.open_connection("127.0.0.1", nats.port)
    login = {"user": USER, "pass": PASSWORD, "headers": True, "verbose": False}
    sizes = f" {len(headers)} {len(headers)}" if headers else " 0"
    command = b"HPUB " if headers else b"PUB "
    writer.write(b"CONNECT " + json.dumps(login).encode() + b"\r\n")
    writer.write(command + subject + sizes.encode() + b"\r\n" + headers + b"\r\n")
    writer.write(b"PUB replies.b 4\r\nlast\r\n")
    await until(lambda: b"last" in heard)
    writer.close()
    assert await bus.request("echo", b"hi", 30, inbox=INBOX) == b"hi"


async def test_ask_encodes_decodes_and_names_a_bad_reply(bus: NatsBus) -> None:
    """nats.md §1: bad JSON in a reply is a decode error."""

    async def running(message: Message) -> bytes:
        return encode(m.RunningReply(instance=message.payload.decode()))

    async def broken(message: Message) -> bytes:
        return b"{"

    await bus.subscribe("running", running)
    await bus.subscribe("broken", broken)
    assert (await ask(bus, "running", m.EmptyRequest(), m.RunningReply, 30)).instance == "{}"
    with pytest.raises(DecodeError):
        await ask(bus, "broken", m.EmptyRequest(), m.RunningReply, 2)


@pytest.mark.rule("nats-1", "nats-10")
async def test_limit_one_keeps_the_order_and_more_runs_side_by_side(bus: NatsBus) -> None:
    """nats.md §3: inline handling is one message at a time per subject."""
    running, most, seen = 0, 0, []

    async def inline(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        seen.append(message.payload)
        running -= 1

    await bus.subscribe("inline", inline, limit=1)
    for index in range(50):
        await bus.publish("inline", b"%d" % index)
    await until(lambda: len(seen) == 50)
    assert most == 1
    assert seen == [b"%d" % index for index in range(50)]


async def test_a_failing_handler_is_logged_and_the_next_message_served(
    bus: NatsBus, caplog: pytest.LogCaptureFixture
) -> None:
    async def fragile(message: Message) -> bytes:
        if message.payload == b"bad":
            raise ValueError("no")
        return b"ok"

    await bus.subscribe("fragile", fragile, limit=1)
    with pytest.raises(RequestTimeout):
        await bus.request("fragile", b"bad", 0.2, inbox=INBOX)
    assert await bus.request("fragile", b"good", 2, inbox=INBOX) == b"ok"
    assert "handler of fragile failed" in caplog.text


async def test_loss_fails_at_once_and_everything_returns(bus: NatsBus, nats: NatsServer) -> None:
    """platform.md trap 9: nothing is stored while down; a lost connection ends waiting requests at once."""
    waiting, release = asyncio.Event(), asyncio.Event()

    async def never(message: Message) -> None:
        waiting.set()
        await release.wait()

    await bus.subscribe("never", never)
    await bus.subscribe("echo", echo)
    generation = bus.generation
    hanging = asyncio.create_task(bus.request("never", b"", 60, inbox=INBOX))
    await asyncio.wait_for(waiting.wait(), 30)
    nats.stop()
    with pytest.raises(NotConnected):
        await asyncio.wait_for(hanging, 30)
    with pytest.raises(NotConnected):
        await bus.publish("echo", b"lost")
    assert not bus.connected
    release.set()
    await bus.subscribe("later", echo)
    await nats.start()
    assert await asyncio.wait_for(bus.wait_connected(after=generation), 90) == generation + 1
    assert await bus.request("echo", b"again", 2, inbox=INBOX) == b"again"
    assert await bus.request("later", b"new", 2, inbox=INBOX) == b"new"


async def test_refused_credentials_never_end_the_dialling(
    nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """nats.md §9.3: never give up on refused credentials; the password is in no log line."""
    nats.stop()
    nats.password = "another"
    await nats.start()
    bus = NatsBus(parse_url(nats.url), name="refused")
    bus.start()
    await until(lambda: "Authorization Violation" in caplog.text)
    nats.stop()
    nats.password = "p@ss:w/rd"
    await nats.start()
    await asyncio.wait_for(bus.wait_connected(), 90)
    await bus.close()
    assert "p@ss" not in caplog.text
    assert "p%40ss" not in caplog.text


async def test_closing_lets_a_running_handler_answer(nats: NatsServer, bus: NatsBus) -> None:
    leaving = NatsBus(parse_url(nats.url), name="leaving")
    leaving.start()
    await asyncio.wait_for(leaving.wait_connected(), 30)
    taken, finish = asyncio.Event(), asyncio.Event()

    async def long(message: Message) -> bytes:
        taken.set()
        await finish.wait()
        return b"done"

    await leaving.subscribe("long", long)
    reply = asyncio.create_task(bus.request("long", b"", 60, inbox=INBOX))
    await asyncio.wait_for(taken.wait(), 30)
    closing = asyncio.create_task(leaving.close())
    finish.set()
    assert await reply == b"done"
    await closing
    with pytest.raises(NoResponders):
        await bus.request("long", b"", 2, inbox=INBOX)


async def test_a_flush_follows_what_was_said_before_it(nats: NatsServer) -> None:
    """Or its answer would not show that the server knows a subscription, and a request would find none."""
    heard = bytearray()

    async def overheard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection(server.hostname, server.port)

        async def passed(source: asyncio.StreamReader, sink: asyncio.StreamWriter, note: bytearray) -> None:
            while data := await source.read(65536):
                note += data
                sink.write(data)
            sink.close()

        await asyncio.gather(passed(reader, back, heard), passed(onward, writer, bytearray()))

    server = urlsplit(nats.url)
    between = await asyncio.start_server(overheard, "127.0.0.1", 0)
    link = Link(lambda text: None)
    port = between.sockets[0].getsockname()[1]
    await link.dial(parse_url(nats.url.replace(f":{server.port}", f":{port}")), "flushing")
    heard.clear()
    await link.client.subscribe("quick")
    await link.client.flush()
    assert 0 <= heard.find(b"SUB quick") < heard.find(b"PING")
    await link.discard()
    between.close()
    await between.wait_closed()


def test_credentials_leave_the_url() -> None:
    servers = parse_url("nats://us%3Aer:p%40ss@a:1,b:2")
    assert servers.urls == ("nats://a:1", "nats://b:2")
    assert (servers.user, servers.password) == ("us:er", "p@ss")
    assert "p@ss" not in repr(servers)
    assert parse_url("tls://tok@h:4").token == "tok"


async def test_a_requester_that_gives_up_first_spoils_nothing_for_the_others(nats: NatsServer) -> None:
    """The subscription to replies is made with the first request and shared by all."""
    other = NatsBus(parse_url(nats.url), name="other")
    other.start()
    await asyncio.wait_for(other.wait_connected(), 30)
    await other.subscribe("echo", echo)
    first = asyncio.create_task(other.request("echo", b"1", 30, inbox=INBOX))
    await asyncio.sleep(0)
    first.cancel()
    assert await other.request("echo", b"2", 30, inbox=INBOX) == b"2"
    await other.close()


async def test_a_flood_of_reports_is_merged_and_none_is_dropped(
    bus: NatsBus, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 22, item 6: a thousand nodes report at once while this process is busy; a queue dropped some."""
    last: dict[str, bytes] = {}

    async def keep(message: Message) -> None:
        last[message.subject] = message.payload

    await bus.subscribe("reports.*", keep, limit=UNQUEUED)
    for number in range(4):
        for node in range(1000):
            await bus._live_link().client.publish(f"reports.{node}", b"%d" % number)
    await bus._live_link().client.flush()
    await until(lambda: len(last) == 1000 and set(last.values()) == {b"3"}, what="the newest of each")
    assert "dropped" not in caplog.text
