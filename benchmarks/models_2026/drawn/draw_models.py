"""Draws 60 models for drawn.py: 40 model types of transformers, and 20 models of four other libraries.

Writes drawn.txt: for each library the number of names in its list, then the first names of a seeded shuffle, twice as
many as are drawn. A model that its own library cannot build is replaced by the next name of the shuffle.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "captured"))
from draw import list_diffusers, list_peft, list_timm, list_torchvision

SEED = 2026
FILE = Path(__file__).with_name("drawn.txt")


def list_types() -> list[str]:
    """Return the model types of transformers that an Auto class creates for a task."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    mappings = [name for name in dir(modeling_auto) if name.startswith("MODEL_FOR_") and name.endswith("MAPPING_NAMES")]
    kinds = {kind for name in mappings for kind in getattr(modeling_auto, name)}
    return sorted(kinds & set(CONFIG_MAPPING_NAMES))


def list_denoisers() -> list[str]:
    """Return the transformers of diffusers."""
    return [name for name in list_diffusers() if "Transformer" in name]


DRAWN: dict[str, tuple[int, Callable[[], list[str]]]] = {
    "transformers": (40, list_types),
    "diffusers": (6, list_denoisers),
    "timm": (5, list_timm),
    "torchvision": (4, list_torchvision),
    "peft": (5, list_peft),
}
"""Library -> how many of its models are drawn, and the function that lists them."""


def read_drawn() -> dict[str, list[str]]:
    """Return by library the names of the committed draw with its reserves, in the order of the shuffle."""
    drawn: dict[str, list[str]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            drawn[line.split()[1]] = []
        else:
            drawn[list(drawn)[-1]].append(line)
    return drawn


def main() -> None:
    """Write the draw."""
    lines = []
    for library, (count, list_names) in DRAWN.items():
        names = list_names()
        lines.append(f"# {library} {version(library)}: {len(names)} names, seed {SEED}, the first {count} are drawn")
        random.Random(SEED).shuffle(names)
        lines += names[: 2 * count]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
