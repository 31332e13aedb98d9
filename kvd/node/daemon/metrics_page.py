"""The metrics of a daemon over HTTP: ``/metrics``, ``/healthz`` and ``/readyz``, in the daemon's event loop.

The loop copies status reports, which `MessageSender.status` keeps cheap; a thread renders them. Whoever asks more often
than `RENDER_EVERY_S` gets the same page again. Connections, the size of requests and the time for each are limited, so
no scrape holds up the daemon.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import stat
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvd.config import Config, parse_address
from kvd.errors import ConfigError
from kvd.files import open_file
from kvd.observe.families import LAG_BUCKETS_S, LoopLag, Seen, page_of
from kvd.observe.log import Throttle, event

MOST_CONNECTIONS: Final = 4
REQUEST_BYTES: Final = 8192
WITHIN_S: Final = 5.0
"""For a request to arrive, and for its answer to be read."""

RENDER_EVERY_S: Final = 0.25
LAG_EVERY_S: Final = 0.25
TOKEN_BYTES: Final = 1024
LEAST_TOKEN_BYTES: Final = 16
LOG_EVERY_S: Final = 60.0

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger("kvd.node")


class LagWatch:
    """A histogram of how late the event loop wakes a timer."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LAG_BUCKETS_S) + 1)
        self._total_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_at = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            late_s = max(0.0, loop.time() - due_at)
            self._counts[bisect_left(LAG_BUCKETS_S, late_s)] += 1
            self._total_s += late_s

    def lag(self) -> LoopLag:
        """Return what was measured so far."""
        below, cumulative = 0, []
        for count in self._counts:
            below += count
            cumulative.append(below)
        return LoopLag(tuple(cumulative), self._total_s)


class MetricsPage:
    """Answers scrapes of one daemon.

    Args:
        config: has the address, and the file with the token.
        role: of the daemon.
        reports: gives the status reports of the jobs that are under way, by name; "" is that of no job.
        is_ready: tells whether the daemon does its work.

    Raises:
        ConfigError: the token cannot be used, or prometheus-client is not installed.
    """

    def __init__(
        self, config: Config, role: str, reports: Callable[[], Mapping[str, bytes]], is_ready: Callable[[], bool]
    ) -> None:
        if find_spec("prometheus_client") is None:
            text = "metrics_bind needs prometheus-client: pip install prometheus-client, or leave metrics_bind empty"
            raise ConfigError(text, setting="metrics_bind")
        self._bind = config.metrics_bind
        self._token = _token_in(Path(config.metrics_token_file)) if config.metrics_token_file else b""
        self._role = role
        self._reports = reports
        self._is_ready = is_ready
        self._lag = LagWatch()
        self._renderer = ThreadPoolExecutor(1, "kvd-metrics")
        self._rendering: asyncio.Task[bytes] | None = None
        self._rendered_at = float("-inf")
        self._connections: set[asyncio.Task[None]] = set()
        self._throttle = Throttle(LOG_EVERY_S)
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen, and return the URL.

        Raises:
            ConfigError: nobody can listen at the address.
        """
        where = parse_address(f"tcp://{self._bind}")
        host = None if where.host == "*" else where.host
        try:
            self._server = await asyncio.start_server(self._accept, host, where.port, limit=REQUEST_BYTES)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error
            text = f"metrics_bind = {self._bind!r}: {why}: name an address of this host with a free port"
            raise ConfigError(text, setting="metrics_bind") from None
        port = self._server.sockets[0].getsockname()[1]
        shown = f"[{where.host}]" if ":" in where.host else where.host
        return f"http://{shown}:{port}/metrics"

    async def run(self) -> None:
        """Measure the loop's lag until cancelled."""
        await self._lag.run()

    def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for task in [*self._connections, *([] if self._rendering is None else [self._rendering])]:
            task.cancel()
        self._renderer.shutdown(wait=False, cancel_futures=True)

    # ── connections ──

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            async with asyncio.timeout(WITHIN_S):
                await self._answer(reader, writer)
        except (TimeoutError, OSError):
            pass  # it was too slow, or has hung up
        except Exception as error:  # noqa: BLE001  a scrape ends no daemon
            if self._throttle.allow(time.monotonic(), "metrics"):
                event(logger, logging.ERROR, "a scrape of the metrics failed", error=repr(error))
        finally:
            self._connections.discard(task)
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()  # it does not read
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            status, body = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"a request has at most 8 KiB\n"
        except asyncio.IncompleteReadError:
            return
        else:
            status, body = await self._respond(request)
        writer.transport.set_write_buffer_limits(0)  # drained: all of it is with the kernel
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(body)}\r\n"
        more = "WWW-Authenticate: Bearer\r\n" if status is HTTPStatus.UNAUTHORIZED else ""
        writer.write(f"{head}{more}Connection: close\r\n\r\n".encode() + body)
        await writer.drain()

    async def _respond(self, request: bytes) -> tuple[HTTPStatus, bytes]:
        line, _, rest = request.partition(b"\r\n")
        method, _, target = line.partition(b" ")
        path = target.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, b"only GET\n"
        if path == b"/healthz":
            return HTTPStatus.OK, b"ok\n"
        if path == b"/readyz":
            return (HTTPStatus.OK, b"ready\n") if self._is_ready() else (HTTPStatus.SERVICE_UNAVAILABLE, b"not yet\n")
        if path != b"/metrics":
            return HTTPStatus.NOT_FOUND, b"/metrics, /healthz, /readyz\n"
        if self._token and not _has_token(rest, self._token):
            return HTTPStatus.UNAUTHORIZED, b"this needs the token of metrics_token_file\n"
        return HTTPStatus.OK, await self._page()

    async def _page(self) -> bytes:
        """The page, which is at most `RENDER_EVERY_S` old. Those who ask meanwhile share it."""
        loop = asyncio.get_running_loop()
        if self._rendering is None or (self._rendering.done() and loop.time() > self._rendered_at + RENDER_EVERY_S):
            self._rendering = loop.create_task(self._render())
        return await asyncio.shield(self._rendering)

    async def _render(self) -> bytes:
        loop = asyncio.get_running_loop()
        reports, lag = self._reports(), self._lag.lag()

        def render() -> bytes:
            jobs = {job: json.loads(report) for job, report in reports.items()}
            return page_of(Seen(self._role, jobs[""], {job: jobs[job] for job in jobs if job}, lag))

        page = await loop.run_in_executor(self._renderer, render)
        self._rendered_at = loop.time()
        return page


def _has_token(headers: bytes, token: bytes) -> bool:
    for line in headers.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"authorization":
            kind, _, given = value.strip().partition(b" ")
            return kind.lower() == b"bearer" and hmac.compare_digest(given.strip(), token)
    return False


def _token_in(path: Path) -> bytes:
    """Read a token.

    Raises:
        ConfigError: there is none that can be used.
    """
    problem, mode, token = "", 0, b""
    try:
        with open_file(path) as file:
            mode, token = os.fstat(file.fileno()).st_mode, file.read(TOKEN_BYTES).strip()
    except OSError as error:
        problem = f"{error.strerror}: name a file with a token"
    if not problem and mode & 0o077:
        problem = f"others may read it (mode {stat.S_IMODE(mode):04o}): chmod 600"
    elif not problem and not (LEAST_TOKEN_BYTES <= len(token) < TOKEN_BYTES and token.isalnum()):
        problem = f"a token is one line of {LEAST_TOKEN_BYTES} letters and digits or more: openssl rand -hex 32"
    if problem:
        raise ConfigError(f"metrics_token_file = {str(path)!r}: {problem}", setting="metrics_token_file")
    return token
