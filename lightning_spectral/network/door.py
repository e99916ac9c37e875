"""The only way from devices to the SuperLink: Flower's Fleet API over TLS, and nothing else.

Flower serves three APIs on one port and authenticates only the devices'. Anyone who can reach the other two can run
code on the server and on every device, so the SuperLink listens on loopback, and devices reach this process instead.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lightning_spectral.errors import from_extra

with from_extra("network"):
    import httpx
    import uvicorn
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response

FLEET = re.compile(rb"/v1/fleet/[a-z-]+")  # of the bytes that were sent: nothing is decoded or normalised before
PASSED = re.compile(rb"accept|content-type|flwr-.+")  # headers, in either direction
LARGEST = 2**24  # bytes of a request; Flower cuts tensors into parts of 5 MiB
SECONDS = 60.0  # that the SuperLink may take for an answer
MOST_CONNECTIONS = 1000


class Door:
    """Passes requests of the Fleet API on to a SuperLink, as an ASGI app.

    A request is read to its end and built anew: its framing, host and other headers do not get through, so the
    SuperLink cannot read it as anything other than what was checked here.

    Args:
        link: URL of the SuperLink.
        authority: Who signed the SuperLink's certificate.
    """

    def __init__(self, link: str, authority: ssl.SSLContext) -> None:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)  # sooner than the SuperLink would close them
        self._link = httpx.AsyncClient(
            base_url=link, verify=authority, timeout=SECONDS, limits=limits, trust_env=False, follow_redirects=False
        )

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._link.aclose()
            await send({"type": "lifespan.shutdown.complete"})
            return
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path, body = request.scope["raw_path"], bytearray()
        if request.method != "POST" or request.scope["query_string"] or not FLEET.fullmatch(path):
            return Response(status_code=404)
        try:
            async for part in request.stream():
                body += part
                if len(body) > LARGEST:
                    return Response(status_code=413)
        except ClientDisconnect:
            return Response(status_code=400)
        try:
            answer = await self._link.post(path.decode(), content=bytes(body), headers=_passed(request.headers.raw))
        except httpx.HTTPError:  # a SuperNode tries again
            return Response(status_code=502)
        response = Response(answer.content, answer.status_code)
        response.raw_headers += _passed([(name.lower(), value) for name, value in answer.headers.raw])
        return response


def _passed(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if PASSED.fullmatch(name)]


def server_of(folder: Path, host: str, port: int, link_port: int) -> uvicorn.Server:
    """What listens for devices when it is run, given the server's folder and the SuperLink's port on loopback."""
    door = Door(f"https://127.0.0.1:{link_port}", ssl.create_default_context(cafile=folder / "ca.crt"))
    # h11 reads requests strictly; no WebSockets, and no addresses from headers that proxies would add
    strict: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "on", "proxy_headers": False}
    quiet: dict[str, Any] = {"server_header": False, "access_log": False, "log_level": "warning"}
    files: dict[str, Any] = {"ssl_certfile": folder / "server.pem", "ssl_keyfile": folder / "server.key"}
    limits: dict[str, Any] = {"limit_concurrency": MOST_CONNECTIONS, "timeout_keep_alive": 30}
    return uvicorn.Server(uvicorn.Config(door, host=host, port=port, **strict, **quiet, **files, **limits))
