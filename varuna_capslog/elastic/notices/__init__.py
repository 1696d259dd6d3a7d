"""Notices that a host is to leave: one small listener per source, gathered into announcements.

Clouds (`clouds`), signals of Slurm, Kubernetes and people, a file, and the program itself. Standard
library only; every listener has threads of its own, and none keeps a process from ending.
"""
