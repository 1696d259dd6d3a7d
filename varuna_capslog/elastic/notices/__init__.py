"""Notices that a host is to leave: one small listener per source, gathered into announcements.

Standard library only; every listener has threads of its own, and none keeps a process from ending.
"""
