"""Guarantee 27: who may talk to a listener."""

from contextlib import nullcontext

import pytest

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.serve.access import Access, Guard
from slim_scheduler.serve.refusal import Kind, Refusal

TOKEN = "0123456789abcdef"


def kind(access: Access, path: str = "/v2", **headers: str) -> Kind | None:
    fields = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    try:
        Guard(access).check(path, "http", fields)
    except Refusal as refusal:
        return refusal.kind
    return None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "[::1]:8000", "LOCALHOST"])
def test_names_of_this_machine_are_served(host):
    assert kind(Access(), host=host) is None


@pytest.mark.parametrize(("version", "answered"), [("1.0", True), ("1.1", False)])
def test_only_http_1_0_needs_no_host(version, answered):
    guard = Guard(Access())
    with nullcontext() if answered else pytest.raises(Refusal, match="Host header is missing"):
        guard.check("/v2", "http", {}, version)


def test_a_page_without_a_host_is_refused():
    with pytest.raises(Refusal):
        Guard(Access()).check("/v2", "http", {b"origin": b"http://evil.example"}, "1.0")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.168.0.7", "", "[::2]"])
def test_a_rebound_name_is_refused(host):
    assert kind(Access(), host=host) is Kind.FORBIDDEN


def test_a_request_without_host_is_refused():
    assert kind(Access()) is Kind.INVALID


def test_other_sites_pages_are_refused_whatever_the_method():
    assert kind(Access(), host="localhost:8000", origin="http://evil.example") is Kind.FORBIDDEN
    assert kind(Access(), host="localhost:8000", origin="null") is Kind.FORBIDDEN
    assert kind(Access(), host="localhost:8000", origin="http://localhost:9000") is Kind.FORBIDDEN
    assert kind(Access(), host="localhost:8000", sec_fetch_site="cross-site") is Kind.FORBIDDEN


def test_the_servers_own_page_and_links_to_it_are_served():
    assert kind(Access(), host="localhost:8000", origin="http://localhost:8000") is None
    assert kind(Access(), host="localhost:8000", sec_fetch_site="cross-site", sec_fetch_mode="navigate") is None
    allowed = Access(origins=("https://ops.example",))
    assert kind(allowed, host="localhost", origin="https://ops.example") is None


def test_a_token_is_needed_for_everything_but_probes_and_the_pages_files():
    access = Access(host="0.0.0.0", token=TOKEN)
    assert kind(access, host="10.0.0.1") is Kind.UNAUTHENTICATED
    assert kind(access, host="10.0.0.1", authorization=f"Bearer {TOKEN}x") is Kind.UNAUTHENTICATED
    assert kind(access, host="10.0.0.1", authorization=f"Basic {TOKEN}") is Kind.UNAUTHENTICATED
    assert kind(access, host="10.0.0.1", authorization=f"Bearer {TOKEN}") is None
    for path in ("/", "/page/page.js", "/v2/health/live", "/v2/health/ready"):
        assert kind(access, path, host="10.0.0.1") is None
    assert kind(access, "/metrics", host="10.0.0.1") is Kind.UNAUTHENTICATED


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_an_open_bind_needs_a_token_or_certificates(host):
    with pytest.raises(ConfigError, match="opens the server to the network"):
        Access(host=host).check()
    Access(host=host, token=TOKEN).check()
    Access(host=host, insecure=True).check()
    Access(host=host, certificate="c", key="k", client_ca="a").check()


def test_half_a_tls_setting_and_short_tokens_are_refused():
    with pytest.raises(ConfigError, match="both a certificate and a key"):
        Access(certificate="c").check()
    with pytest.raises(ConfigError, match="needs --tls-cert"):
        Access(client_ca="a").check()
    with pytest.raises(ConfigError, match="at least 16"):
        Access(token="short").check()
