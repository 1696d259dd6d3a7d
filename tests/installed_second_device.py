"""Gives the process that imports this, and its forks, the second device."""

from tests.second_device import install

install()
