"""CAPSlog on an installed, unmodified Microsoft Varuna.

    import varuna_capslog.varuna_plugin as plugin
    plugin.install()
    plugin.configure(cuts="plan.json")

This package imports without Varuna; `install` looks for it. Varuna is no part of this project: docs/varuna.md says
where to get it, what is patched, and why.
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
