"""Draws the models of captured60.py: a seeded shuffle of the list of models of each of five libraries.

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
    """Return all classes that the library's auto classes create for a task."""
    from transformers.models.auto import modeling_auto

    mappings = [name for name in dir(modeling_auto) if name.startswith("MODEL_FOR_") and name.endswith("MAPPING_NAMES")]
    classes: set[str] = set()
    for name in mappings:
        for value in getattr(modeling_auto, name).values():
            classes.update([value] if isinstance(value, str) else value)
    return sorted(classes)


def list_timm() -> list[str]:
    """Return `timm.list_models()`."""
    import timm

    return sorted(timm.list_models())


def list_torchvision() -> list[str]:
    """Return `torchvision.models.list_models()`."""
    import torchvision

    return sorted(torchvision.models.list_models())


def list_diffusers() -> list[str]:
    """Return the public model classes, without `Multi...`, which only hold other models, and the base `ModelMixin`."""
    import diffusers

    classes = []
    for name in dir(diffusers):
        member = getattr(diffusers, name, None) if name[0].isupper() else None
        if inspect.isclass(member) and issubclass(member, diffusers.ModelMixin):
            classes.append(name)
    return sorted(name for name in classes if name != "ModelMixin" and "Multi" not in name)


def list_peft() -> list[str]:
    """Return every tuner of the library on each of six base models of transformers."""
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
    """Return the names in the order of the shuffle."""
    order = list(names)
    random.Random(SEED).shuffle(order)
    return order


def read_drawn() -> dict[str, list[str]]:
    """Return by library the names of the committed draw, in the order of the shuffle."""
    drawn: dict[str, list[str]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            drawn[line.split()[1]] = []
        elif line:
            drawn[list(drawn)[-1]].append(line)
    return drawn


def main() -> None:
    """Write the draw."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    lines = []
    for library, names_of in LISTS.items():
        names = names_of()
        lines.append(f"# {library} {version(library)}: {len(names)} names, seed {SEED}, the first {DRAWN} are drawn")
        lines += shuffled(names)[:WRITTEN]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
