"""One layer as torch.compile makes it, with code that does not depend on what else its process has run before.

`ahead` makes it, and `layers` calls it in training; so does the check of a variant that compiles
(`profiling/variant_check`). Nothing here decides which layers are compiled.
"""

from __future__ import annotations

from typing import Any

import torch

from varuna_capslog.base.errors import CapslogError

__all__ = ["CompiledForward", "check_backend"]

_MOST_VERSIONS = 100_000
"""torch would run a layer plainly, and say so nowhere, once its code was compiled for eight kinds of shapes or layers.
Which process meets how many depends on the cuts."""


def check_backend(backend: str) -> None:
    """Raises CapslogError for a backend that this torch does not know."""
    backends = torch._dynamo.list_backends(exclude_tags=())
    if backend not in backends:
        raise CapslogError(
            f"train.compile={backend!r} is no backend of torch.compile here; known: {', '.join(sorted(backends))}; "
            "null runs the layers as they are"
        )


class CompiledForward:
    """A layer's module as torch.compile makes it; the module, and its state, stay as they are.

    Sizes are fixed in the code, each with a code of its own: torch would otherwise leave sizes open once it has met
    two, and another process, which has met one, would compute with other code.
    """

    def __init__(self, module: torch.nn.Module, backend: str) -> None:
        self.backend = backend
        self._call = torch.compile(module, backend=backend, dynamic=False)
        self._limits = torch._dynamo.config.patch(
            recompile_limit=_MOST_VERSIONS,
            accumulated_recompile_limit=_MOST_VERSIONS,
            fail_on_recompile_limit_hit=True,
        )

    def __call__(self, *tensors: torch.Tensor) -> Any:
        with self._limits:
            return self._call(*tensors)
