"""A terminal: standard streams that break, signals, and which errors are one line."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO, cast

from raptor.progress import started_processes


@contextmanager
def safe_streams() -> Iterator[None]:
    """Inside, a standard stream that nobody reads any more is silent, so that it never ends a run.

    A closed one (`2>&-`) is opened on /dev/null first: the next file that is opened would otherwise take its number
    and receive what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given, which is this one.
            os.open(os.devnull, os.O_RDWR)
    old = sys.stdout, sys.stderr
    for stream in old:
        if hasattr(stream, "reconfigure"):  # what a terminal's encoding lacks is written as \\u00e9
            stream.reconfigure(errors="backslashreplace")
    try:
        # A full disk behind standard output is an error, because a result would be lost. Progress on standard error is
        # none.
        sys.stdout = cast(TextIO, _Unbroken(sys.stdout, BrokenPipeError))
        sys.stderr = cast(TextIO, _Unbroken(sys.stderr, OSError))
        yield
    finally:
        sys.stdout, sys.stderr = old


class _Unbroken:
    """A standard stream on which errors of one kind are not raised; after the first it writes to /dev/null."""

    def __init__(self, stream: TextIO | None, ignored: type[OSError]):
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115
        self._ignored = ignored

    def write(self, text: str) -> int:
        with self._silent():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._silent():
            self._stream.flush()

    @contextmanager
    def _silent(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            with suppress(OSError, ValueError):  # what is in the buffer goes there too, when the process ends
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if isinstance(error, OSError) and not isinstance(error, self._ignored):
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Stopped(KeyboardInterrupt):
    """A signal stopped the command.

    Not a plain KeyboardInterrupt: where one of those comes out of `exec` of a text, which dataclasses do while they are
    imported, Python ends the process by SIGINT although it was caught.
    """


_DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP (a closed terminal) raise `Stopped`."""
    # Python lets only the main thread set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_signal: object) -> None:
        raise Stopped

    with ExitStack() as handlers:
        for number, default in _DEFAULTS.items():
            if signal.getsignal(number) is default:  # nohup ignores SIGHUP, and a program may have its own
                signal.signal(number, stop)
                handlers.callback(signal.signal, number, default)
        yield


def is_users(error: Exception) -> bool:
    """Whether the input or the machine is at fault, not the program."""
    return isinstance(error, ValueError | OSError) or _machines_fault(error) != ""


def one_line(error: Exception) -> str:
    # A file name may hold line ends and control characters, and the message is one line.
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(error).split()))
    text = text or type(error).__name__
    fault = _machines_fault(error)
    return f"{fault} ({text[:120]})" if fault else text


def _machines_fault(error: Exception) -> str:
    """What to say of an error that is the machine's; empty for any other. torch and our readers may not be imported."""
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU's memory is full: lower --batch_size"
    devices = sys.modules.get("raptor.devices")
    if started_processes()[1] > 1 and devices is not None and devices.is_lost_rank(error):
        return "another process of this command ended"
    images = sys.modules.get("raptor.data.images")
    if images is not None and images.is_dead_worker(error):
        return "a process that decodes images died: if memory is short, lower --num_workers"
    return ""


def fail_fast_offline() -> None:
    """Without a network, let the Hugging Face hub use only its cache: else it tries again for a minute."""
    from urllib.parse import urlparse
    from urllib.request import getproxies

    host = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    # Behind a proxy the name may be known to the proxy only, and somebody who sets HF_HUB_OFFLINE has decided.
    if host is None or getproxies() or "HF_HUB_OFFLINE" in os.environ:
        return
    found: list[Any] = []

    def look_up() -> None:
        with suppress(OSError):
            found.extend(socket.getaddrinfo(host, 443))

    # In a thread, because a name lookup has no timeout of its own.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(3)
    if not found:
        os.environ["HF_HUB_OFFLINE"] = "1"
