"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell that starts the suite in the background makes it ignore Ctrl-C, and every process it starts inherits that; the
# tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
