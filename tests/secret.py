"""A secret for stores and relays that a test opens itself."""

from varuna_capslog.base.secret import Secret

SECRET = Secret("tests know this secret, and nobody else")
