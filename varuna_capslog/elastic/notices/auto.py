"""The sources of notices where the caller names none: the cloud that answers, the launcher's signals, the program.

Asks all three clouds at once and waits a bounded time; a host in no cloud costs that time once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping

from varuna_capslog.elastic.notices.aws import AwsListener
from varuna_capslog.elastic.notices.azure import AzureListener
from varuna_capslog.elastic.notices.callback import CallbackListener
from varuna_capslog.elastic.notices.file import FileListener
from varuna_capslog.elastic.notices.gcp import GcpListener
from varuna_capslog.elastic.notices.interface import Listener, Unavailable
from varuna_capslog.elastic.notices.metadata import LINK_LOCAL, HttpOpener, MetadataListener
from varuna_capslog.elastic.notices.signals import SignalListener, signal_meanings

__all__ = ["auto_sources", "detect_cloud"]

_log = logging.getLogger(__name__)

CLOUDS: dict[str, type[MetadataListener]] = {cloud.source: cloud for cloud in (AwsListener, GcpListener, AzureListener)}


def detect_cloud(timeout: float = 1.0, endpoint: str = LINK_LOCAL) -> str | None:
    """The cloud whose metadata server answers: aws, gcp or azure; None if none did in `timeout` seconds."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    asks = HttpOpener()

    def ask(name: str) -> None:
        try:
            answers.put(name if CLOUDS[name].answers(asks, endpoint, timeout) else None)
        except Unavailable:
            answers.put(None)

    for name in CLOUDS:
        threading.Thread(target=ask, args=(name,), name=f"notices-detect-{name}", daemon=True).start()
    until = time.monotonic() + timeout
    found = None
    with contextlib.suppress(queue.Empty):
        for _ in CLOUDS:
            found = answers.get(timeout=max(0.0, until - time.monotonic()))
            if found:
                break
    asks.cut()
    return found


def auto_sources(
    host: str = "",
    file: str | os.PathLike[str] | None = None,
    timeout: float = 1.0,
    environ: Mapping[str, str] | None = None,
    endpoint: str = LINK_LOCAL,
) -> tuple[Listener, ...]:
    """The sources for this host, not started: its cloud, signals (in the main thread only), the program, and `file`.

    Args:
        host: its name in the run.
        timeout: seconds that the search for a cloud may take.
        environ: of the process, unless given.
    """
    environ = os.environ if environ is None else environ
    sources: list[Listener] = [CallbackListener(host)]
    if threading.current_thread() is threading.main_thread():
        sources.append(SignalListener(signal_meanings(environ), host))
    if file is not None:
        sources.append(FileListener(file, host))
    cloud = detect_cloud(timeout, endpoint)
    if cloud is not None:
        sources.append(CLOUDS[cloud](host, endpoint=endpoint))
    _log.info("notices are listened for from: %s", ", ".join(source.source for source in sources))
    return tuple(sources)
