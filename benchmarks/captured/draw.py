"""Draws the models of captured60.py: a seeded shuffle of each of five libraries' own list of models.

Writes drawn.txt: for each library the number of names in its list, then the shuffle's first 40 names. The first 12 are
the drawn ones; a model that its own library cannot run at a small size is replaced by the next name of the shuffle.
"""

from __future__ import annotations

import argparse
import inspect
import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

SEED = 42
WRITTEN = 40
DRAWN = 12
FILE = Path(__file__).with_name("drawn.txt")
PEFT_BASES = ("BERT", "GPT-2", "Llama", "OPT", "T5", "ViT")


def list_transformers() -> list[str]:
    """Every class that one of the library's auto classes makes for a task."""
    from transformers.models.auto import modeling_auto

    mappings = [name for name in dir(modeling_auto) if name.startswith("MODEL_FOR_") and name.endswith("MAPPING_NAMES")]
    found: set[str] = set()
    for name in mappings:
        for value in getattr(modeling_auto, name).values():
            found.update([value] if isinstance(value, str) else value)
    return sorted(found)


def list_timm() -> list[str]:
    """`timm.list_models()`."""
    import timm

    return sorted(timm.list_models())


def list_torchvision() -> list[str]:
    """`torchvision.models.list_models()`."""
    import torchvision

    return sorted(torchvision.models.list_models())


def list_diffusers() -> list[str]:
    """The public model classes; a `Multi...` is only a list of others, and `ModelMixin` is their base."""
    import diffusers

    found = []
    for name in dir(diffusers):
        one = getattr(diffusers, name, None) if name[0].isupper() else None
        if inspect.isclass(one) and issubclass(one, diffusers.ModelMixin):
            found.append(name)
    return sorted(name for name in found if name != "ModelMixin" and "Multi" not in name)


def list_peft() -> list[str]:
    """Every tuner of the library on each of six base models of transformers."""
    from peft import PeftType

    return sorted(f"{tuner.value} on {base}" for tuner in PeftType for base in PEFT_BASES)


LISTS: dict[str, Callable[[], list[str]]] = {
    "transformers": list_transformers,
    "timm": list_timm,
    "diffusers": list_diffusers,
    "torchvision": list_torchvision,
    "peft": list_peft,
}


def shuffled(names: list[str]) -> list[str]:
    """The names in the order of the shuffle."""
    order = list(names)
    random.Random(SEED).shuffle(order)
    return order


def read_drawn() -> dict[str, list[str]]:
    """Library -> the names of the committed draw, in the order of the shuffle."""
    found: dict[str, list[str]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            found[line.split()[1]] = []
        elif line:
            found[list(found)[-1]].append(line)
    return found


def main() -> None:
    """Writes the draw."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    lines = []
    for library, names_of in LISTS.items():
        names = names_of()
        lines.append(f"# {library} {version(library)}: {len(names)} names, seed {SEED}, the first {DRAWN} are drawn")
        lines += shuffled(names)[:WRITTEN]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
