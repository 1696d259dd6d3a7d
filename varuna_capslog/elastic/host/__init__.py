"""Supervisor of one machine: starts workers, watches them, passes on notices and requests, reports losses."""
