"""Which package called `varuna` is here: Microsoft's at the known commit, another state of it, or another thing.

`install` asks before it changes anything. Files are compared, nothing is imported: the unrelated package of that name
must not run because of a look at it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from varuna_capslog.base.errors import CapslogError

__all__ = ["COMMIT", "FoundVaruna", "find_varuna"]

COMMIT = "a2145cc30b976a7917829a55e2a866f0ca4c54e5"
"""The commit of https://github.com/microsoft/varuna that the patches are written for."""

_SOURCES = {
    "__init__.py": "410080c0ed95a5e9c698500d38b4c06f567cbafcadb4b718caeffb80ab5ded7e",
    "checkpoint.py": "2a80fbc36bbae780781aeefe9aaa3291238c60e1ec3462973ea101d34bef0138",
    "launcher.py": "773a867fa88c4f5384d468c9109c09a1e6c35fc9036cc9eb5649983a5a24c020",
    "partitioned_model.py": "5e10cc504c44099fc0e6f3617e57e19f0d19a6b2633df120c43d47c3f2775872",
    "pipeline.py": "a8153ee40460edc140c4ad9654281dbd26b10ab3d78d915a8ca259138ddbac07",
    "utils.py": "f47e6ac4e876a2a90a828c5a5a741b71cfc0c72d91a6692a8aff1c661cbee81b",
    "varuna.py": "d10bf87f89265b712402c58291d87d2838960aceaf25954da51580571930c7b3",
}
"""SHA-256 of every file that a patch touches or relies on, at `COMMIT`."""

_ADVICE = (
    f"get it with `git clone https://github.com/microsoft/varuna && git -C varuna checkout {COMMIT[:7]}` and put that "
    "folder on PYTHONPATH (docs/varuna.md)"
)


@dataclass(frozen=True)
class FoundVaruna:
    """The right Varuna: its folder and commit."""

    folder: Path
    commit: str = COMMIT


def find_varuna() -> FoundVaruna:
    """The Varuna that `import varuna` would give, when it is the one that the patches fit.

    Raises:
        CapslogError: there is none, it is the unrelated package of that name, or files differ from the known commit;
            the message says which and what to do.
    """
    try:
        spec = importlib.util.find_spec("varuna")
    except (ImportError, ValueError) as error:
        raise CapslogError(f"`varuna` cannot be looked up ({error}); {_ADVICE}") from error
    if spec is None:
        raise CapslogError(f"Microsoft's Varuna is not importable here; {_ADVICE}")
    folders = list(spec.submodule_search_locations or ())
    where = Path(folders[0]) if folders else Path(spec.origin or "?")
    missing = [name for name in _SOURCES if not (where / name).is_file()]
    if "partitioned_model.py" in missing or "pipeline.py" in missing:
        raise CapslogError(
            f"the `varuna` at {where} is not Microsoft's pipeline trainer (it has no {missing[-1]}): the package of "
            f"that name on the package index is something else; uninstall it, then {_ADVICE}"
        )
    if missing:
        raise CapslogError(f"the Varuna at {where} lacks {', '.join(missing)}; {_ADVICE}")
    changed = [name for name, digest in _SOURCES.items() if _digest(where / name) != digest]
    if changed:
        raise CapslogError(
            f"the Varuna at {where} differs from commit {COMMIT[:7]} in {', '.join(changed)}; patches written for "
            f"other code could give wrong numbers without a word: {_ADVICE}"
        )
    return FoundVaruna(where)


def _digest(path: Path) -> str:
    # a checkout on another platform may have other line ends
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
