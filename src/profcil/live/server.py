"""The page over HTTP. It answers three addresses, reads no path from a request, and changes nothing."""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from profcil.errors import ConfigError
from profcil.live.watcher import Watcher

COOKIE = "profcil_token"
TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")
SECONDS = 20  # after which a silent connection is closed
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer):
    """Serves the page of a watcher. Without a token only requests to a name of this machine are answered."""

    daemon_threads = True

    def __init__(self, watcher: Watcher, host: str, port: int, token: str) -> None:
        self.watcher = watcher
        self.token = token
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/" + (f"?token={self.token}" if self.token else "")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off is nothing to report."""


class Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = SECONDS

    def do_GET(self) -> None:
        try:
            place = urlsplit(self.path)
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return self.refuse(HTTPStatus.BAD_REQUEST, "the address is not understood")
        if not self.server.token and not is_loopback(host):  # a foreign page whose name leads to this machine
            return self.refuse(HTTPStatus.FORBIDDEN, "this name is not that of the server")
        if self.server.token and self.is_token(parse_qs(place.query).get("token", [""])[0]):
            more = {"Location": place.path, "Set-Cookie": self.cookie()}
            return self.reply(HTTPStatus.SEE_OTHER, "text/plain", "", more)
        if self.server.token and not any(map(self.is_token, self.tokens())):
            return self.refuse(HTTPStatus.UNAUTHORIZED, "open the address that `profcil serve` printed, with its token")
        if place.path not in PAGES:
            return self.refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        self.show(*PAGES[place.path])

    do_HEAD = do_GET

    def show(self, kind: str, make: Callable[[Watcher], str]) -> None:
        try:
            text = make(self.server.watcher)
        except Exception as error:  # the server goes on, and the page says what is wrong
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, reason)
        self.reply(HTTPStatus.OK, kind, text)

    def version_string(self) -> str:
        return "profcil"

    def is_token(self, given: str) -> bool:
        """Compares in a time that does not depend on where the texts differ."""
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def tokens(self) -> list[str]:
        """The tokens of a request: in its cookie, and in the header `Authorization: Bearer TOKEN`."""
        found = [self.headers.get("Authorization", "").removeprefix("Bearer ")]
        with suppress(CookieError):
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
            found += [cookies[COOKIE].value] if COOKIE in cookies else []
        return found

    def cookie(self) -> str:
        return f"{COOKIE}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"

    def refuse(self, status: HTTPStatus, reason: str) -> None:
        self.reply(status, "text/plain", f"{status.value} {status.phrase}: {reason}\n")

    def reply(self, status: HTTPStatus, kind: str, text: str, more: dict[str, str] | None = None) -> None:
        body = text.encode()
        policy = {"Content-Security-Policy": self.server.watcher.policy()}
        self.send_response(status)
        for name, value in {**HEADERS, **policy, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what http.server refuses. A method other than GET and HEAD is not allowed."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:
            self.reply(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", "only GET and HEAD\n", {"Allow": "GET, HEAD"})
        else:
            self.refuse(status, "the request is not understood")
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: a page that is left open asks every two seconds."""


def json_text(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


PAGES: dict[str, tuple[str, Callable[[Watcher], str]]] = {
    "/": ("text/html", lambda watcher: watcher.html()),
    "/live.json": ("application/json", lambda watcher: json_text(watcher.live())),
    "/data.json": ("application/json", lambda watcher: json_text(watcher.data())),
    "/favicon.ico": ("image/svg+xml", lambda watcher: '<svg xmlns="http://www.w3.org/2000/svg"/>'),
}


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, seen from itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(host: str, token: str) -> None:
    """Refuses another host without a token, and a token that is short or has other characters."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"the host {host} can be reached from other machines; give --token TEXT, or leave out --host to serve "
            "this machine only"
        )
    if token and not TOKEN.fullmatch(token):
        raise ConfigError("the token is not usable; give at least 16 letters, digits, - or _")


def make_server(watcher: Watcher, host: str, port: int, token: str) -> PageServer:
    """A server that is bound to its port. Port 0 is any free one."""
    check_token(host, token)
    try:
        return PageServer(watcher, host, port, token)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{host}, port {port} cannot be used ({reason}); give another --host or --port") from None
