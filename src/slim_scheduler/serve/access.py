"""Who may talk to the server: Host, Origin and token of every request, whatever its method.

A page on another site must not reach a server on this machine (DNS rebinding, cross-site requests), and a server
that listens beyond this machine asks for a token or a client certificate. Nothing here reads a body.
"""

import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Mapping

import msgspec

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.serve.refusal import Kind, Refusal, invalid, quote

LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Probes, and the page's own files: they say nothing and change nothing, so they need no token.
OPEN_PATHS = frozenset(("/", "/v2/health/live", "/v2/health/ready", "/favicon.ico"))
OPEN_PREFIX = "/page/"
# A name or an address, and a port (RFC 9110, 7.2): nothing may follow that another reader takes for the name.
HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._~%-]*))(?::[0-9]{0,5})?")
Headers = Mapping[bytes, bytes]


class Access(msgspec.Struct, frozen=True):
    """How one listener is protected. `hosts` and `origins` add to what the bind address allows."""

    host: str = "127.0.0.1"
    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    insecure: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ConfigError for a bind that anyone could use."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and a key; give --tls-cert and --tls-key")
        if self.client_ca and not self.certificate:
            raise ConfigError("--tls-client-ca asks clients for certificates, which needs --tls-cert and --tls-key")
        if self.token is not None and len(self.token) < 16:
            raise ConfigError(
                f"the token has {len(self.token)} characters; give at least 16, such as `openssl rand -hex 16`"
            )
        if not is_loopback(self.host) and not (self.token or self.client_ca or self.insecure):
            raise ConfigError(
                f"binding {self.host} opens the server to the network; give --token (or SLIM_TOKEN), "
                "or --tls-client-ca, or --insecure if that is meant"
            )


class Guard:
    """Checks requests to one listener."""

    def __init__(self, access: Access) -> None:
        access.check()
        self._names = {*LOOPBACK, access.host.lower(), *(host.lower() for host in access.hosts)}
        self._anywhere = not is_loopback(access.host)
        if self._anywhere:
            self._names.add(socket.gethostname().lower())
        self._origins = {origin.lower().rstrip("/") for origin in access.origins}
        self._token = access.token.encode() if access.token else None
        self._known_hosts: set[bytes] = set()

    def check(self, path: str, scheme: str, headers: Headers, version: str = "1.1") -> None:
        """Raises Refusal for a request that must not be served. HTTP/1.0 needs no Host; no browser speaks it."""
        host = headers.get(b"host")
        if host is None and version != "1.0":
            raise Refusal(Kind.INVALID, "the Host header is missing; HTTP/1.1 needs it")
        if host is not None and host not in self._known_hosts:
            self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None:
            self._check_origin(origin, host or b"", scheme)
        site = headers.get(b"sec-fetch-site")
        if site in (b"cross-site", b"same-site") and headers.get(b"sec-fetch-mode") != b"navigate" and origin is None:
            raise Refusal(Kind.FORBIDDEN, "requests from other sites' pages are not served; see --allow-origin")
        if self._token is not None and path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX):
            self.check_token(headers.get(b"authorization", b""))

    def check_token(self, authorization: bytes) -> None:
        """Raises Refusal unless a needed token was given. Takes the same time for every wrong one."""
        if self._token is None:
            return
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            raise Refusal(Kind.UNAUTHENTICATED, "this server needs a token; send Authorization: Bearer TOKEN")

    def _check_host(self, host: bytes) -> None:
        found = HOST.fullmatch(host)
        if found is None:
            raise invalid(f"Host {quote(host.decode('latin-1'))} is no host and port; send NAME:PORT or [ADDRESS]:PORT")
        name = (found[1] or found[2]).decode("latin-1").lower()
        if name not in self._names and not (self._anywhere and _is_address(name)):
            raise Refusal(
                Kind.FORBIDDEN, f"Host {quote(host.decode('latin-1'))} is not served here; add it with --allow-host"
            )
        if len(self._known_hosts) < 1024:
            self._known_hosts.add(host)

    def _check_origin(self, origin: bytes, host: bytes, scheme: str) -> None:
        given = origin.decode("latin-1").lower().rstrip("/")
        own = f"{scheme}://{host.decode('latin-1').lower()}"
        if given != own and given not in self._origins:
            raise Refusal(Kind.FORBIDDEN, f"Origin {quote(given)} may not use this server; add it with --allow-origin")


def is_loopback(host: str) -> bool:
    """Whether a bind address is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_from_environment(given: str | None) -> str | None:
    """The token of the command line, or SLIM_TOKEN, which other users of the machine cannot see in a process list."""
    return given or os.environ.get("SLIM_TOKEN") or None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
