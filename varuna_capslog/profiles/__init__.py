"""What each layer of a chain costs: the record, the runs that fill it, and (in their own modules) measuring and
estimating.

Importing this package does not import torch, so that planning stays light; `measure`, `trim` and `estimate` do when
they are imported by name.
"""

from varuna_capslog.profiles.record import (
    LayerProfile,
    Observation,
    Profile,
    SharedParameter,
    layers_of_runs,
    read_profile,
    write_profile,
)

__all__ = [
    "LayerProfile",
    "Observation",
    "Profile",
    "SharedParameter",
    "layers_of_runs",
    "read_profile",
    "write_profile",
]
