"""What is an address, which spellings are one, and what a stranger's text can never become."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit import addresses

GOOD = {
    "gpu-1:7001": ("gpu-1:7001", "dns:///gpu-1:7001"),
    "GPU-1.Example.:7001": ("gpu-1.example:7001", "dns:///gpu-1.example:7001"),
    "my_host.lan:1": ("my_host.lan:1", "dns:///my_host.lan:1"),
    "3com.example:65535": ("3com.example:65535", "dns:///3com.example:65535"),
    "10.0.0.5:7001": ("10.0.0.5:7001", "ipv4:10.0.0.5:7001"),
    "[::1]:7001": ("[::1]:7001", "ipv6:[::1]:7001"),
    "[2001:DB8:0::0001]:7001": ("[2001:db8::1]:7001", "ipv6:[2001:db8::1]:7001"),
}
BAD = [
    "", ":", "gpu-1", "gpu-1:", ":7001", "gpu-1:0", "gpu-1:65536", "gpu-1:07001", "gpu-1:+7", "gpu-1: 7",
    "gpu-1:\uff17", "gpu-1:7001/", "gpu-1:7001,gpu-2:7001", "gpu-1/x:7001", " gpu-1:7001", "gpu-1:7001\n",
    "unix:7001", "unix:/run/engine.sock", "unix:///run/engine.sock", "unix-abstract:x:1", "vsock:1:2",
    "dns:gpu-1:7001", "dns:///gpu-1:7001", "ipv4:10.0.0.5:7001", "ipv6:[::1]:7001", "xds:///x:1",
    "http://gpu-1:7001", "user@gpu-1:7001", "::1:7001", "[::1:7001", "::1]:7001", "[gpu-1]:7001", "[]:7001",
    "[fe80::1%eth0]:7001", "[::1]x:7001", "[[::1]]:7001", "127.1:7001", "0x7f.1:7001", "0x7f000001:7001",
    "2130706433:7001", "010.0.0.5:7001", "1.2.3.4.5:7001", "a..b:7001", ".a:7001", "-a:7001", "a-:7001",
    "gpu\u20111:7001", "gpu-1\u200b:7001", "\u2170:1", "\u212a:1", "a:1:2", "*:1",
    f"{'a' * 64}:1", f"{'a.' * 127}aa:1",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_an_address_has_one_spelling_and_one_target(text: str) -> None:
    address = addresses.parse(text)
    assert (str(address), address.target) == GOOD[text]


@pytest.mark.parametrize("text", [text for text in BAD if text != "unix:7001"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        addresses.parse(text)


def test_a_host_that_is_called_like_a_scheme_is_a_host() -> None:
    """`unix:7001` is a socket's path for gRPC; here it can only be the host of that name."""
    assert addresses.parse("unix:7001").target == "dns:///unix:7001"


@given(
    st.text(max_size=60) | st.sampled_from(BAD) | st.from_regex(r"[a-z0-9.:\[\]/%-]{1,40}", fullmatch=True)
)
def test_no_text_names_a_scheme(text: str) -> None:
    """What is accepted survives a second reading and has a scheme of ours."""
    try:
        address = addresses.parse(text)
    except ValueError:
        return
    assert addresses.parse(str(address)) == address
    scheme, _, rest = address.target.partition(":")
    assert rest.removeprefix("///") == str(address)
    assert scheme in {"ipv4", "ipv6", "dns"}
    assert 1 <= address.port <= 65535


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("GPU-1:7001", "gpu-1.:7001", True),
        ("[::1]:7", "[0:0::1]:7", True),
        ("gpu-1:7001", "gpu-1:7002", False),
        ("gpu-1:7001", "gpu-2:7001", False),
        ("", "", True),
        ("", "gpu-1:7001", False),
    ],
)
def test_two_texts_that_mean_one_address(one: str, other: str, same: bool) -> None:
    assert addresses.is_same_address(one, other) is same


@pytest.mark.parametrize("text", ["[::ffff:127.0.0.1]:7", "[::FFFF:7f00:1]:7", "127.0.0.1:7"])
def test_an_ipv4_address_in_ipv6_clothes_is_that_address(text: str) -> None:
    """Otherwise a worker of another machine could name this one's loopback."""
    found = addresses.parse(text)
    assert (found.host, addresses.is_local(found.host)) == ("127.0.0.1", True)


def test_only_names_and_addresses_of_this_machine_are_loopback() -> None:
    """A name that merely begins like one is another machine's."""
    own = ("localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")
    others = ("localhost.example.com", "127.example", "127.0.0.1.example.com", "::1.example", "0.0.0.0", "")
    assert {host for host in (*own, *others) if addresses.is_loopback(host)} == set(own)
