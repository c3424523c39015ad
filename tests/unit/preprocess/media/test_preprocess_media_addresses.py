"""Which addresses and hosts media files are fetched from."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.preprocess.media.addresses import AllowedHosts, PublicAddresses

NOT_PUBLIC_V4 = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/29",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
]
NOT_PUBLIC_V6 = [
    "::/96",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "100::/64",
    "2001::/32",
    "2001:db8::/32",
    "2002::/16",
    "3fff::/20",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
]
permits = PublicAddresses().permits


@st.composite
def not_public_addresses(draw: st.DrawFn) -> str:
    network = ip_network(draw(st.sampled_from(NOT_PUBLIC_V4 + NOT_PUBLIC_V6)))
    number = int(network.network_address) + draw(st.integers(0, network.num_addresses - 1))
    return str(IPv4Address(number) if network.version == 4 else IPv6Address(number))


@given(not_public_addresses())
def test_public_addresses_any_address_of_another_network_is_refused(address: str) -> None:
    assert not permits(address)
    if ":" in address:
        assert not permits(IPv6Address(address).exploded)
        assert not permits(f"{address}%eth0")


@given(st.integers(0, 2**32 - 1))
def test_public_addresses_an_ipv4_address_inside_an_ipv6_one_is_refused(number: int) -> None:
    inner = IPv4Address(number)
    assert not permits(f"::ffff:{inner}")
    assert not permits(f"::{inner}")
    assert not permits(f"64:ff9b::{inner}")
    assert not permits(str(IPv6Address((0x2002 << 112) | (number << 80))))


@given(st.integers(0, 2**32 - 1))
def test_public_addresses_an_ipv4_address_is_permitted_only_outside_all_listed_networks(number: int) -> None:
    address = IPv4Address(number)
    if permits(str(address)):
        assert not any(address in IPv4Network(network) for network in NOT_PUBLIC_V4)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001::1"])
def test_public_addresses_of_the_internet_are_permitted(address: str) -> None:
    assert permits(address)


@pytest.mark.parametrize("text", ["", "127.1", "0x7f000001", "2130706433", "0177.0.0.1", "localhost", "8.8.8.8 "])
def test_public_addresses_other_spellings_are_refused(text: str) -> None:
    assert not permits(text)


def test_allowed_hosts_permits_listed_names_only() -> None:
    hosts = AllowedHosts(["Images.Example.com", "*.cdn.example", "other.example:8443"])
    assert hosts.permits("images.example.com", 443)
    assert hosts.permits("a.b.cdn.example", 443)
    assert hosts.permits("other.example", 8443)
    for host, port in [
        ("images.example.com", 80),
        ("example.com", 443),
        ("ximages.example.com", 443),
        ("cdn.example", 443),
        (".cdn.example", 443),
        ("evilcdn.example", 443),
        ("other.example", 443),
    ]:
        assert not hosts.permits(host, port)


def test_allowed_hosts_star_permits_all_names_and_empty_list_is_false() -> None:
    assert AllowedHosts(["*"]).permits("anything.example", 443)
    assert not AllowedHosts([])


@pytest.mark.parametrize("entry", ["https://a.example", "a.*.example", "*a.example", "a.example:x", "", "ü.example"])
def test_allowed_hosts_malformed_entry_raises(entry: str) -> None:
    with pytest.raises(ValueError, match="media host"):
        AllowedHosts([entry])
