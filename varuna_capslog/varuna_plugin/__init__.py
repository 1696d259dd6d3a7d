"""CAPSlog on an installed, unmodified Microsoft Varuna.

    import varuna_capslog.varuna_plugin as plugin
    plugin.install()
    plugin.configure(cuts="plan.json")

Nothing here needs Varuna to be imported; `install` looks for it. Varuna is never part of this project: see
docs/varuna.md for where to get it and for what is patched and why.
"""

from varuna_capslog.varuna_plugin.elastic_run import ElasticEnd, run_elastic
from varuna_capslog.varuna_plugin.executor import Microbatches
from varuna_capslog.varuna_plugin.install import (
    COMMIT,
    FoundVaruna,
    find_varuna,
    install,
    installed_patches,
    uninstall,
)
from varuna_capslog.varuna_plugin.options import configure
from varuna_capslog.varuna_plugin.profiling import profile

__all__ = [
    "COMMIT",
    "ElasticEnd",
    "FoundVaruna",
    "Microbatches",
    "configure",
    "find_varuna",
    "install",
    "installed_patches",
    "profile",
    "run_elastic",
    "uninstall",
]
