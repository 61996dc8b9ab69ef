"""The names and addresses of the nodes of an allocation, by which programs name their peers in error messages."""

import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_WORD = re.compile(r"[\w.:%-]+")
"""A part of a message that may be a name or an address; NCCL writes the port behind it, as in 10.0.0.2<44206>."""
_PORT = re.compile(r":\d{1,5}$")


def addresses_of_host(root: Path = Path("/")) -> list[str]:
    """The names and addresses of this host: IPv4, IPv6, GIDs of InfiniBand and RoCE, and its names in /etc/hosts.

    It reads files of Linux only, since a name server may not answer.
    """
    addresses = {*_ipv4_addresses(root), *_ipv6_addresses(root), *_gids(root)}
    names = {socket.gethostname()}
    for line in _read(root / "etc/hosts").splitlines():
        address_text, *host_names = line.partition("#")[0].split() or [""]
        if _canonical(address_text) in addresses:
            names.update(host_names)
    return sorted(names) + sorted(addresses)


def _ipv4_addresses(root: Path) -> set[str]:
    """The local IPv4 addresses; in fib_trie a line `/32 host LOCAL` follows the line of each."""
    local_addresses = re.findall(r"\|-- (\S+)\n\s*/32 host LOCAL", _read(root / "proc/net/fib_trie"))
    return {address for text in local_addresses if (address := _canonical(text))}


def _ipv6_addresses(root: Path) -> set[str]:
    """The local IPv6 addresses; each line of if_inet6 begins with 32 hexadecimal digits."""
    digits = re.findall(r"^([0-9a-f]{32})\s", _read(root / "proc/net/if_inet6"), re.MULTILINE)
    return {address for text in digits if (address := _canonical(":".join(re.findall("....", text))))}


def _gids(root: Path) -> set[str]:
    """The GIDs of InfiniBand and RoCE devices, which errors of ibverbs name."""
    paths = (root / "sys/class/infiniband").glob("*/ports/*/gids/*")
    return {address for path in paths if (address := _canonical(_read(path).strip()))}


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _canonical(text: str) -> str | None:
    """An address in its one canonical form; None for other texts, and for addresses that every host has."""
    with suppress(ValueError):
        address: IPv4Address | IPv6Address = ip_address(text.partition("%")[0])
        if isinstance(address, IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return None if address.is_loopback or address.is_unspecified else str(address)
    return None


class AddressBook:
    """Finds the hosts of an allocation that a message names, by host name,
    by the name of an interface or by address.
    """

    def __init__(self, hosts: Sequence[str], addresses: Mapping[str, Iterable[str]] | None = None) -> None:
        """`addresses` gives each host's other names and its addresses;
        one that several hosts have names none of them.
        """
        self._hosts = sorted({*hosts}, key=len, reverse=True)
        hosts_by_address = defaultdict[str, set[str]](set)
        for host in hosts:
            hosts_by_address[host.lower()].add(host)
        for host, host_addresses in (addresses or {}).items():
            for text in host_addresses:
                hosts_by_address[_canonical(text) or text.lower()].add(host)
        self._host_by_address = {
            address: next(iter(owners)) for address, owners in hosts_by_address.items() if len(owners) == 1
        }

    def hosts_in(self, text: str) -> set[str]:
        """The hosts that a text names."""
        return {host for name_text in _WORD.findall(text) if (host := self._host_of(name_text.rstrip(".:-")))}

    def _host_of(self, name_text: str) -> str | None:
        """The host of a name or an address, perhaps with a port; None if it is of no known host."""
        for name in (name_text, _PORT.sub("", name_text)):
            if host := self._host_by_address.get(_canonical(name) or name.lower()):
                return host
        return self._host_of_interface(_PORT.sub("", name_text).partition(":")[0].partition(".")[0].lower())

    def _host_of_interface(self, label: str) -> str | None:
        """The host whose interface has this name: sites add a word to the name of the host,
        as in gpu02-ib0 or ib-gpu02.

        Of several hosts the one with the longest name counts, so that gpu1-2-ib is no interface of gpu1.
        """
        for host in self._hosts:
            name = host.partition(".")[0].lower()
            added = label.removeprefix(f"{name}-") if label.startswith(f"{name}-") else ""
            added = added or (label.removesuffix(f"-{name}") if label.endswith(f"-{name}") else "")
            if label == name or re.match("[a-z]", added):
                return host
        return None
