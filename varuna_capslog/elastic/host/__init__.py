"""One machine's supervisor: starts workers, watches them, passes on notices and requests, and reports what happens."""
