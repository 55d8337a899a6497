"""Serves the page of a run on this machine: curves, each card beside its forecast, what was decided of a
supervised run. It reads the log directory alone, during the run and after it. From elsewhere: ssh -L
PORT:127.0.0.1:PORT HOST. Ctrl-C ends it."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from yuan_train.cli.main import file_to_write
from yuan_train.cli.show import add_run_options
from yuan_train.config.errors import ConfigError, hearing

if TYPE_CHECKING:
    from yuan_train.report.run_log import RunReader

REFRESH_SECONDS = 10
"""After which a browser asks for the page again."""
PORT = 8222


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add_run_options(parser)
    add("--port", type=int, default=PORT, metavar="P", help=f"0: any free one ({PORT})")
    add("--once", type=file_to_write, metavar="F.html", help="write the page to a file instead, and end")
    add("--terminal", action="store_true", help="show it in this terminal instead")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, or write the page once. Raises ConfigError for a directory that is none,
    a port that is taken, and with --once for a run without a finished step."""
    from yuan_train.cli.show import reader_of
    from yuan_train.config.load import write_text
    from yuan_train.report.run_page import run_html

    folder, reader = Path(arguments.directory), reader_of(arguments)
    if arguments.once:
        write_text(arguments.once, run_html(reader.read()))
        print(f"written: {arguments.once}", file=sys.stderr)
        return 0
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such directory; wanted the log directory of a run (log.directory)")
    if arguments.terminal:
        return _show_again(reader)
    page = _Page(folder, reader)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", arguments.port), _handler(page))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port {arguments.port}: cannot be opened: {error}; give another, or 0 for any free one"
        ) from None

    def end(*_: object) -> None:
        # From a thread: `shutdown` waits for the loop that the signal has interrupted.
        threading.Thread(target=server.shutdown, daemon=True).start()

    with server, hearing({signal.SIGINT: end, signal.SIGTERM: end}):
        print(f"http://127.0.0.1:{server.server_port}/ shows {folder}; Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0


def _show_again(reader: RunReader) -> int:
    """Print what `show` prints, over itself every REFRESH_SECONDS, until SIGINT or SIGTERM."""
    ended = threading.Event()
    with hearing(dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda *_: ended.set())):
        _show(reader)
        while not ended.wait(REFRESH_SECONDS):
            _show(reader)
    return 0


def _show(reader: RunReader) -> None:
    """Print what `show` prints, over itself in a terminal."""
    from yuan_train.report.run_page import run_lines

    try:
        lines = run_lines(reader.read())
    except ConfigError as error:
        lines = [str(error)]
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        cut = [line[: size.columns] for line in lines[: size.lines - 1]]
        print("\x1b[H\x1b[2J" + "\n".join(cut), flush=True)
    else:
        print("\n".join(lines), end="\n\n", flush=True)


class _Page:
    """The page of a run, drawn anew when one of its files has changed."""

    def __init__(self, folder: Path, reader: RunReader) -> None:
        self._folder, self._reader = folder, reader
        self._lock = threading.Lock()
        self._drawn: tuple[object, bytes] | None = None

    def bytes(self) -> bytes:
        """The page as it is now; while there is no step yet, one that says so."""
        with self._lock:
            state = self._state()
            if self._drawn is None or self._drawn[0] != state:
                self._drawn = state, self._draw().encode()
            return self._drawn[1]

    def _state(self) -> list[tuple[str, int, int]]:
        found: list[tuple[str, int, int]] = []
        for path in sorted(self._folder.glob("*.*")):
            with suppress(OSError):
                stat = path.stat()
                found.append((path.name, stat.st_size, stat.st_mtime_ns))
        return found

    def _draw(self) -> str:
        from yuan_train.report.html import whole_page
        from yuan_train.report.run_page import run_html

        try:
            return run_html(self._reader.read(), refresh=REFRESH_SECONDS)
        except ConfigError as error:
            words = "<p>Nothing to see yet. This page looks again by itself.</p>"
            return whole_page(f"{self._folder.name}: {error}", [("", words)], refresh=REFRESH_SECONDS)


def _handler(page: _Page) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/":
                self.send_error(404)
                return
            body = page.bytes()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a browser asks every few seconds."""

    return Handler
