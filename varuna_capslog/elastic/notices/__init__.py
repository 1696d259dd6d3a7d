"""Warnings that a host is to leave: one small listener per source, gathered into announcements.

    with listen(auto_sources(), callback):
        ...

Clouds (`aws`, `gcp`, `azure`), signals of Slurm, Kubernetes and people, a file, and the program itself. Standard
library only; every listener has threads of its own, and none keeps a process from ending.
"""

from varuna_capslog.elastic.notices.auto import auto_sources
from varuna_capslog.elastic.notices.callback import CallbackListener, on_notice
from varuna_capslog.elastic.notices.gather import Announcement, Gathering, listen
from varuna_capslog.elastic.notices.interface import Clock, Deadline, Kind, Listener, Notice
from varuna_capslog.elastic.notices.ladder import Rung, protocol_event, rung

__all__ = [
    "Announcement",
    "CallbackListener",
    "Clock",
    "Deadline",
    "Gathering",
    "Kind",
    "Listener",
    "Notice",
    "Rung",
    "auto_sources",
    "listen",
    "on_notice",
    "protocol_event",
    "rung",
]
