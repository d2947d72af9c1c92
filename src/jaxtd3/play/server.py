"""The page and its requests over HTTP, with the standard library alone.

    GET  /            the page           GET  /frames    a stream of events, one per step
    GET  /scene       shapes, once       GET  /state     all that can be told, as JSON
    POST /control     {"command": [0.5, 0, 0]}, {"push": 1}, {"pause": true}, ...

Nothing else is served, so no path leads to a file. On the loopback interface only requests that
name it as their host are answered (a page elsewhere cannot borrow a name for it); on any other
address every request needs the token. A request that another site's page sends is refused.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import secrets
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxtd3.errors import UserError
from jaxtd3.play.scene import pack_scene
from jaxtd3.play.session import Session

PORT = 8230
MOST_BYTES = 4096  # of a request's body
MOST_STREAMS = 8
PAGE = Path(__file__).parent / "page"
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_text() -> bytes:
    """The page as one file: its style and programs stand inside it."""
    text = (PAGE / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "draw.js", "page.js"):
        text = text.replace(f"/* {name} */", (PAGE / name).read_text(encoding="utf-8"))
    return text.encode()


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server(ThreadingHTTPServer):
    """Bound when it is made; answers once `start` gave it a session."""

    daemon_threads = True
    session: Session

    def __init__(self, host: str = "127.0.0.1", port: int = PORT):
        if not 0 <= port <= 65535:
            raise UserError(f"--port {port} is not between 0 and 65535")
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self.address_family = family
            super().__init__((host, port), Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port} is in use: choose another with --port") from error
            why = error.strerror or str(error)
            raise UserError(f"cannot listen on {host}, port {port}: {why}") from error
        self.host = host
        self.token = None if is_loopback(host) else secrets.token_urlsafe(18)
        self.streams, self.frames_sent = 0, 0
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        return self.socket.getsockname()[1]

    @property
    def url(self) -> str:
        """What to open in a browser, the token included."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def server_bind(self) -> None:
        """As the library does, but no name server is asked who we are."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)

    def start(self, session: Session) -> None:
        """Answer requests from now on, in threads of their own."""
        self.session = session
        self.page, self.scene = page_text(), pack_scene(session.model, session.standins)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error of ours."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "jaxtd3", ""
    timeout = 30  # seconds that a silent connection is kept
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the terminal is for the person who plays."""

    def do_GET(self) -> None:
        path = self.admitted()
        if path == "/":
            self.answer(self.server.page, "text/html; charset=utf-8")
        elif path == "/scene":
            self.answer(self.server.scene, "application/octet-stream")
        elif path == "/state":
            self.answer_json({**self.server.session.state(), "frames": self.server.frames_sent})
        elif path == "/frames":
            self.stream()
        elif path is not None:
            self.refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def do_POST(self) -> None:
        path = self.admitted()
        if path is None:
            return
        if path != "/control":
            return self.refuse(HTTPStatus.NOT_FOUND, "there is no such request")
        if self.headers.get_content_type() != "application/json":
            return self.refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON")
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_BYTES:
            return self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request is too long")
        try:
            asked = json.loads(self.rfile.read(int(length)))
            self.answer_json(self.server.session.control(asked))
        except UserError as error:
            self.answer_json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        except (ValueError, RecursionError):
            self.answer_json({"error": "this is not JSON"}, HTTPStatus.BAD_REQUEST)

    def admitted(self) -> str | None:
        """The path of a request that may be answered; None: it was refused."""
        url = urlsplit(self.path)
        why = self.unwelcome(url.query)
        if why is not None:
            self.refuse(HTTPStatus.FORBIDDEN, why)
            return None
        return url.path

    def unwelcome(self, query: str) -> str | None:
        """Why a request is not answered, if so."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        token = self.server.token
        if token is None:
            if host.rpartition(":")[0] not in LOCAL_NAMES and host not in LOCAL_NAMES:
                return f"this is not {host[:80] or 'that host'}"
        else:
            given = parse_qs(query).get("token", [""])[0]
            if not hmac.compare_digest(given.encode(), token.encode()):
                return "the token is missing or wrong"
        if origin is not None and origin != f"http://{host}":
            return "requests of other sites are not answered"
        return None

    def refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True  # what else was sent is not read
        self.answer_json({"error": why}, status)

    def answer_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.answer(json.dumps(value).encode(), "application/json", status)

    def answer(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self) -> None:
        """Every frame as an event; a browser that is slow misses some."""
        server, session = self.server, self.server.session
        with server.lock:
            full = server.streams >= MOST_STREAMS
            server.streams += not full
        if full:
            return self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many are watching")
        self.close_connection = True
        try:
            self.send_response(HTTPStatus.OK)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            first = {
                "terms": session.spec.reward_terms,
                "weights": session.weights.tolist(),
                "layout": session.layout,
                "ranges": session.ranges,
                "env": session.spec.name,
                "dt": session.spec.dt,
                "floating": session.floating,
                **session.about,
            }
            self.send_event("about", first)
            while not session.ended:
                self.send_event("frame", session.frame())
                server.frames_sent += 1
                with session.changed:
                    session.changed.wait(0.5)
            self.send_event("end", {})
        finally:
            with server.lock:
                server.streams -= 1

    def send_event(self, name: str, value: Any) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()
