"""Authenticated connections between the machines of a cluster, and the network interfaces that they go through."""

from __future__ import annotations

import fcntl
import ipaddress
import secrets
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path

__all__ = ["Doorway", "connect", "interface_of", "limit_receiving", "own_address"]

HANDSHAKE_LIMIT = 20
"""Seconds that the other side gets to answer once it is connected."""
SILENCE_LIMIT = 30
"""Seconds after which a machine that does not answer is gone; without a limit we would wait forever for a dead one."""
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IF_INET6 = Path("/proc/net/if_inet6")


class Doorway:
    """Listens on every interface, and lets in processes that know the key.

    Attributes
    ----------
    key
        The secret that a connecting process has to know.
    port
        The TCP port.
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        self.port: int = self._socket.getsockname()[1]

    def accept(self, until: float, instead: Connection | None = None) -> tuple[Connection, object] | None:
        """Return the next connection and the hello that came with it; processes without the key are turned away.

        Parameters
        ----------
        until
            When to give up, in :func:`time.monotonic`'s seconds.
        instead
            A connection on which a message ends the wait, too.

        Returns
        -------
        None if the time is over, or if there is a message on ``instead`` and no process to let in.
        """
        waiting: list[socket.socket | Connection] = [self._socket, *([] if instead is None else [instead])]
        while True:
            ready = wait(waiting, max(0.0, until - time.monotonic()))
            if self._socket not in ready:
                return None
            accepted, _ = self._socket.accept()
            connection = _prepared(accepted)
            try:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
                hello: object = connection.recv()
            except (AuthenticationError, EOFError, OSError):
                connection.close()
                continue
            limit_receiving(connection, 0)
            return connection, hello

    def close(self) -> None:
        self._socket.close()


def connect(host: str, port: int, key: bytes, hello: object) -> Connection:
    """Connect to a :class:`Doorway`.

    Raises
    ------
    OSError
        If no process listens there.
    AuthenticationError
        If the listening process does not know the key.
    """
    connection = _prepared(socket.create_connection((host, port), timeout=HANDSHAKE_LIMIT))
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send(hello)
    except BaseException:
        connection.close()
        raise
    limit_receiving(connection, 0)
    return connection


def _prepared(connected: socket.socket) -> Connection:
    """Return the connection of a socket, which it takes over."""
    connected.settimeout(None)  # a connection reads and writes the descriptor itself
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENCE_LIMIT // 2),
        (socket.TCP_KEEPINTVL, SILENCE_LIMIT // 6),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENCE_LIMIT),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connection = Connection(connected.detach())
    limit_receiving(connection, HANDSHAKE_LIMIT)
    return connection


def limit_receiving(connection: Connection, seconds: int) -> None:
    """Make receiving from ``connection`` fail with an OSError if nothing comes for ``seconds``; 0 for no limit."""
    with socket.socket(fileno=connection.fileno()) as borrowed:
        borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
        borrowed.detach()


def own_address(connection: Connection) -> str:
    """Return the address of this end of a TCP connection, without the prefix of an IPv4 address in IPv6."""
    with socket.socket(fileno=connection.fileno()) as borrowed:
        address: str = borrowed.getsockname()[0]
        borrowed.detach()
    return address.removeprefix("::ffff:").partition("%")[0]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has ``address``; None if there is none.

    >>> interface_of("127.0.0.1"), interface_of("192.0.2.1")
    ('lo', None)
    """
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        for line in _IF_INET6.read_text(encoding="ascii").splitlines() if _IF_INET6.exists() else ():
            digits, *_, name = line.split()
            if int(digits, 16) == int(wanted):
                return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if answer[20:24] == wanted.packed:
                return name
    return None
