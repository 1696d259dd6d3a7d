"""The pool of worker processes that the engine's tests use, for runs on own data."""

from tests.engine.conftest import one_thread, pool

__all__ = ["one_thread", "pool"]
