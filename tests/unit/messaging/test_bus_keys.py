"""Keys and credentials of the bus, against facts of the NATS format and a token of a running reference."""

import base64
import json

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit import nkeys
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.messaging import messages
from localai_cluster.messaging.servers import (
    Credentials,
    account_token,
    mint_service,
    mint_worker,
    parse_url,
    permissions_of,
    revocations_of,
    revoking_token,
    url_for_worker,
)

NODE = "2bade988-0b3a-4400-83eb-e2cf86d9429a"
RECORDED = {
    "publish": [f"nodes.{NODE}.backend.install.*.progress", f"nodes.{NODE}.files.>", "_INBOX.>"],
    "subscribe": [f"nodes.{NODE}.>", "_INBOX.>"],
}
"""The allow lists of a running reference."""


def signature_holds(token: str) -> bool:
    head, _, signature = token.rpartition(".")
    issuer = base64.b32decode(nkeys.claims_of(token)["iss"])[1:33]
    try:
        Ed25519PublicKey.from_public_bytes(issuer).verify(
            base64.urlsafe_b64decode(signature + "=="), head.encode()
        )
    except InvalidSignature:
        return False
    return True


@pytest.mark.parametrize(("role", "letter"), [("operator", "O"), ("account", "A"), ("user", "U")])
def test_a_key_says_what_it_is_for(role: nkeys.Role, letter: str) -> None:
    """nats.md §9.1: seeds begin with S and the letter of the role."""
    made = nkeys.generate(role)
    assert (made.public_key[0], made.seed[:2]) == (letter, f"S{letter}")
    assert (len(made.public_key), len(made.seed)) == (56, 58)
    assert nkeys.from_seed(made.seed, role) == made
    assert made.seed not in repr(made)


@given(st.text(max_size=80))
def test_what_is_no_seed_is_refused_and_not_quoted(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^(not an NKEY seed|not the seed of|a seed of the role)"
    ) as refused:
        nkeys.from_seed(text, "user")
    assert len(text) < 8 or text not in str(refused.value)


def test_a_damaged_seed_and_one_of_another_role_are_refused() -> None:
    seed = nkeys.generate("account").seed
    damaged = seed[:-1] + ("A" if seed[-1] != "A" else "Q")
    with pytest.raises(ValueError, match="not an NKEY seed"):
        nkeys.from_seed(damaged, "account")
    with pytest.raises(ValueError, match="role account, not user"):
        nkeys.from_seed(seed, "user")


@pytest.mark.rule("W35", "nats-9.2")
def test_a_workers_token_is_the_references_but_for_the_inbox() -> None:
    """Claims and lists as recorded; an inbox of its own in place of the shared one (*Build*)."""
    account = nkeys.generate("account")
    made = mint_worker(account, nkeys.generate("user"), "backend", NODE, now=1_795_223_762.7, lifetime=120)
    head = json.loads(base64.urlsafe_b64decode(made.jwt.split(".")[0] + "=="))
    claims = nkeys.claims_of(made.jwt)
    assert head == {"typ": "JWT", "alg": "ed25519-nkey"}
    assert (claims["iat"], claims["exp"], made.lifetime) == (1_795_223_762, 1_795_223_882, 120)
    assert claims["name"] == f"localai-backend-{NODE}"
    assert (claims["iss"], claims["sub"]) == (account.public_key, made.public_key)
    nats = claims["nats"]
    own = [subject.replace("_INBOX.>", f"_INBOX.{NODE}.>") for subject in RECORDED["publish"]]
    assert nats.pop("pub") == {"allow": own}
    assert nats.pop("sub") == {"allow": [f"nodes.{NODE}.>", f"_INBOX.{NODE}.>"]}
    assert nats == {
        "subs": -1,
        "data": -1,
        "payload": -1,
        "issuer_account": account.public_key,
        "type": "user",
        "version": 2,
    }
    assert len(claims["jti"]) == 52
    assert signature_holds(made.jwt)
    assert made.jwt not in repr(made)
    assert made.seed not in repr(made)


@pytest.mark.rule("T-JWT-5", "T-JWT-6", "nats-8", "nats-9.2")
def test_an_agent_gets_what_agents_need_and_no_commands_to_workers() -> None:
    allowed = permissions_of("agent", NODE)
    assert not any("install" in subject for subject in allowed.publish + allowed.subscribe)
    assert allowed.publish == ("agent.>", "jobs.>", f"_INBOX.{NODE}.>")
    assert set(allowed.subscribe) == {
        "agent.execute",
        "agent.*.cancel",
        "gallery.*.cancel",
        "gallery.*.progress",
        "jobs.*.cancel",
        "jobs.*.progress",
        "jobs.*.result",
        "jobs.mcp-ci.new",
        "mcp.tools.execute",
        "mcp.discovery",
        f"nodes.{NODE}.backend.stop",
        "staging.*.progress",
        f"_INBOX.{NODE}.>",
    }


@pytest.mark.rule("nats-1.1")
@given(st.text(min_size=1, max_size=40))
def test_a_nodes_lists_hold_its_own_subjects_only(node_id: str) -> None:
    """nats-1.1: the same rule makes subjects and permissions; no id widens what it may reach."""
    allowed = permissions_of("backend", node_id)
    own = messages.token(node_id)
    for subject in allowed.publish + allowed.subscribe:
        first, second, *rest = subject.split(".")
        assert (first, second) in (("nodes", own), ("_INBOX", own))
        assert rest
    assert not set(own) & set(".*> \t\n")


def test_credentials_that_do_not_belong_together_are_refused() -> None:
    """nats.md §9.1: JWT and seed come from the same source."""
    account = nkeys.generate("account")
    one, other = (mint_service(account, "x", now=1.0) for _ in range(2))
    assert Credentials.of(one.jwt, one.seed) == one
    assert one.lifetime is None
    for jwt, seed in ((one.jwt, other.seed), ("a.b.c", one.seed), ("", one.seed), (one.jwt, "SU")):
        with pytest.raises(ValueError, match=r".") as refused:
            Credentials.of(jwt, seed)
        assert seed not in str(refused.value) or len(seed) < 8


def test_revocations_replace_each_other_and_leave_the_rest_of_an_account() -> None:
    operator, account = nkeys.generate("operator"), nkeys.generate("account")
    before = account_token(operator, account.public_key, "mine", now=1.0)
    after = revoking_token(operator, before, {"U1": 7}, now=2.0)
    again = revoking_token(operator, after, {"U2": 8}, now=3.0)
    assert (revocations_of(before), revocations_of(after), revocations_of(again)) == (
        {},
        {"U1": 7},
        {"U2": 8},
    )
    assert signature_holds(again)
    one, two = nkeys.claims_of(before), nkeys.claims_of(again)
    assert one["nats"]["limits"] == two["nats"]["limits"]
    assert (one["sub"], one["name"]) == (two["sub"], two["name"])


@pytest.mark.parametrize(
    ("configured", "own_host", "told"),
    [
        ("nats://127.0.0.1:4222", "10.0.0.5", "nats://10.0.0.5:4222"),
        ("nats://0.0.0.0:4333", "cluster.lan", "nats://cluster.lan:4333"),
        ("nats://localhost", "2001:db8::1", "nats://[2001:db8::1]:4222"),
        ("nats://127.0.0.1:4222", "127.0.0.1", "nats://127.0.0.1:4222"),
        ("nats://127.0.0.1:4222", "", "nats://127.0.0.1:4222"),
        ("tls://u:hush@bus.lan:4222,bus2.lan:4223", "10.0.0.5", "tls://bus.lan:4222,nats://bus2.lan:4223"),
    ],
)
def test_a_worker_is_told_a_bus_that_it_can_reach(configured: str, own_host: str, told: str) -> None:
    assert url_for_worker(configured, own_host) == told


@pytest.mark.parametrize(
    "text",
    ["", ",", "http://h", "nats://", "nats://h:0", "nats://h:x", "nats://[::1", "nats://h/x?y", "n" * 3000],
)
def test_what_is_no_url_of_a_bus(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a NATS URL"):
        parse_url(text)
