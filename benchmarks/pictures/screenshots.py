"""Takes pictures of pages in a browser, at 1280 and 390 px, light and dark: see README.md of this folder."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.browser import browser_missing, open_browser

_WIDTHS = (1280, 390)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE.html")
    parser.add_argument("--output", type=Path, default=Path("screenshots"), help="folder for the pictures")
    arguments = parser.parse_args()
    install_browser()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with open_browser() as browser:
        for page in arguments.pages:
            for width in _WIDTHS:
                for dark in (False, True):
                    browser.look(width, dark)
                    browser.show(page)
                    name = f"{page.resolve().parts[-3]}-{page.stem}-{width}{'-dark' if dark else ''}.png"
                    browser.picture(arguments.output / name)
                    print(arguments.output / name)


def install_browser() -> None:
    """Install Debian's Chromium and its driver where they are missing; needs the right to."""
    if browser_missing() is None:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", "chromium", "chromium-driver"]
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
