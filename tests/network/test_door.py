"""The door lets requests of Flower's Fleet API through to the SuperLink, and nothing else, however it is written."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from lightning_spectral.network import door
from lightning_spectral.network.kit import write_certificates
from lightning_spectral.network.local_network import free_port

FLEET = b"/v1/fleet/pull-messages"
ANSWERED = b'{"answer": 1}'


class Link:
    """In place of a SuperLink: remembers what it is asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, dict[bytes, bytes], bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.seen.append((scope["method"], scope["raw_path"], dict(scope["headers"]), body))
        headers = [(b"content-type", b"application/json"), (b"flwr-version", b"1"), (b"set-cookie", b"a=b")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWERED})


@contextmanager
def running(server: uvicorn.Server) -> Iterator[None]:
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Link, Path, int]]:
    folder, link, ports = tmp_path_factory.mktemp("server"), Link(), (free_port(), free_port())
    write_certificates(folder, "server.example")
    files: dict[str, Any] = {"ssl_certfile": folder / "server.pem", "ssl_keyfile": folder / "server.key"}
    options: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_level": "warning", **files}
    behind = uvicorn.Server(uvicorn.Config(link, port=ports[1], **options))
    with running(behind), running(door.server_of(folder, "127.0.0.1", *ports)):
        yield link, folder, ports[0]


def say(place: tuple[Link, Path, int], sent: bytes, *, is_one: bool = True) -> tuple[list[int], bytes]:
    """Send bytes over one connection; return the statuses of the answers, and all that came back."""
    link, folder, port = place
    link.seen.clear()
    context, got = ssl.create_default_context(cafile=folder / "ca.crt"), b""
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    with context.wrap_socket(plain, server_hostname="server.example") as connection:
        connection.sendall(sent)
        connection.settimeout(10 if is_one else 0.3)
        with suppress(TimeoutError, ConnectionError):  # it waits for more, or has closed the connection
            while part := connection.recv(65536):
                got += part
                if is_one and (ANSWERED in got or b"content-length: 0\r\n" in got):
                    break
    return [int(line.split()[1]) for line in got.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")], got


def request(method: bytes = b"POST", target: bytes = FLEET, headers: bytes = b"", body: bytes = b"") -> bytes:
    length = b"" if b"ransfer-" in headers or b"ontent-L" in headers else b"Content-Length: %d\r\n" % len(body)
    return b"%s %s HTTP/1.1\r\nHost: server.example\r\n%s%s\r\n%s" % (method, target, length, headers, body)


def test_a_request_of_a_device_and_its_answer_get_through(place: Any) -> None:
    passed = b"Content-Type: application/x-protobuf\r\nflwr-signature: c2ln\r\n"
    other = b"Authorization: Bearer x\r\nCookie: a=b\r\nX-Forwarded-For: 1.2.3.4\r\n"
    statuses, got = say(place, request(headers=passed + other, body=b"12345"))
    ((method, path, seen, body),) = place[0].seen
    assert (method, path, body) == ("POST", FLEET, b"12345")
    assert seen[b"content-type"] == b"application/x-protobuf"
    assert seen[b"flwr-signature"] == b"c2ln"
    assert seen[b"host"].startswith(b"127.0.0.1:")
    assert not {b"authorization", b"cookie", b"x-forwarded-for"} & seen.keys()
    assert statuses == [403]
    assert ANSWERED in got
    assert b"flwr-version: 1" in got
    assert b"set-cookie" not in got


TARGETS = rb"""
/ /docs /openapi.json /health /v1/control/start-run /v1/runtime/acquire-task * server.example:8000
/v1/fleet /v1/fleet/ /v1/fleet/x/ /v1/fleet/x:y /v1/fleet/x%00 //v1/fleet/x /v1//fleet/x /v1/fleet//x /V1/fleet/x
/v1/fleet/../control/start-run /v1/fleet/x/../../control/start-run /v1/fleet/..\control\start-run
/v1/fleet/%2e%2e/control/start-run /v1/fleet/..%2fcontrol%2fstart-run /v1/%66leet/x /v1/fleet;/../control/start-run
/v1/fleet/x?/v1/control /v1/fleet/x#/v1/control /v1/control/start-run?/v1/fleet/x /v1/control/start-run#/v1/fleet/x
https://127.0.0.1/v1/control/start-run https://server.example/v1/fleet/x
""".split()


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_the_fleet_api_gets_through(place: Any, target: bytes) -> None:
    statuses, _ = say(place, request(target=target))
    assert statuses in ([404], [400])
    assert place[0].seen == []


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"TRACE", b"PRI", b"post"])
def test_nothing_but_a_post_gets_through(place: Any, method: bytes) -> None:
    statuses, _ = say(place, request(method))
    assert statuses in ([404], [400])
    assert place[0].seen == []


HIDDEN = request(target=b"/v1/control/start-run", body=b"evil")
CHUNKED = b"Transfer-Encoding: chunked\r\n"
UPGRADE = b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
SMUGGLED = {
    "in a body": request(body=HIDDEN),
    "in a chunk": request(headers=CHUNKED, body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)),
    "after a length of nothing": request(headers=b"Content-Length: 0\r\n", body=HIDDEN),
    "after the last chunk": request(headers=CHUNKED, body=b"0\r\n\r\n" + HIDDEN),
    "with length and chunks": request(headers=b"Content-Length: 4\r\n" + CHUNKED, body=b"0\r\n\r\n" + HIDDEN),
    "with chunks and length": request(headers=CHUNKED + b"Content-Length: 500\r\n", body=b"0\r\n\r\n" + HIDDEN),
    "with two lengths": request(headers=b"Content-Length: 0\r\nContent-Length: 99\r\n", body=HIDDEN),
    "with a signed length": request(headers=b"Content-Length: +0\r\n", body=HIDDEN),
    "with odd chunks": request(headers=b"Transfer-Encoding: xchunked\r\n", body=b"0\r\n\r\n" + HIDDEN),
    "with a folded header": request(headers=b"Transfer-Encoding:\r\n chunked\r\n", body=b"0\r\n\r\n" + HIDDEN),
    "with a space before the colon": request(headers=b"Transfer-Encoding : chunked\r\n", body=b"0\r\n\r\n" + HIDDEN),
    "with bare line feeds": request(headers=b"X: y\n\n" + HIDDEN),
    "in a chunk's extension": request(headers=CHUNKED, body=b"0;\n" + HIDDEN + b"\r\n\r\n"),
    "in a trailer": request(headers=CHUNKED, body=b"0\r\nX: y\r\n\r\n" + HIDDEN),
    "in a header that is passed on": request(headers=b"flwr-signature: x\r\n\tPOST /v1/control/start-run HTTP/1.1\r\n"),
    "after a switch to WebSockets": request(headers=UPGRADE + b"Upgrade: websocket\r\n") + HIDDEN,
    "after a switch to HTTP/2": request(headers=b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n") + HIDDEN,
    "in a pipeline": request(body=b"1") + HIDDEN + request(body=b"2"),
}


@pytest.mark.parametrize("how", SMUGGLED)
def test_a_request_that_is_hidden_in_another_does_not_get_through(place: Any, how: str) -> None:
    say(place, SMUGGLED[how], is_one=False)
    assert {path for _, path, _, _ in place[0].seen} <= {FLEET}
    assert len(place[0].seen) <= 2


def test_a_body_that_is_too_large_is_refused(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "LARGEST", 1000)
    assert say(place, request(body=bytes(1000)))[0] == [403]
    assert say(place, request(body=bytes(1001)))[0] == [413]
    assert say(place, request(headers=CHUNKED, body=b"3e9\r\n%s\r\n0\r\n\r\n" % bytes(1001)))[0] == [413]
    assert place[0].seen == []


def test_a_device_is_told_to_try_again_while_the_superlink_is_away(tmp_path: Path) -> None:
    write_certificates(tmp_path, "server.example")
    ports = free_port(), free_port()
    with running(door.server_of(tmp_path, "127.0.0.1", *ports)):
        assert say((Link(), tmp_path, ports[0]), request())[0] == [502]
