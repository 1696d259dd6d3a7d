"""Notices that a host must leave: one listener per source; `gather` joins their notices into announcements.

Imports no torch. Every listener has threads of its own, which do not keep a process from ending.
"""
