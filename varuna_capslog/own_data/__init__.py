"""Own data: `capslog.train(model, dataset)` and configs with `workload: varuna_capslog.own_data:workload`.

A map-style dataset becomes a `DataSource`; its samples are read by the rank that needs them or by loader processes
beside it, seeded by sample, so that neither cuts nor morphs change the data of a run. `TextFile`, `TokenFile` and
`ImageFolder` are ready-made datasets.
"""

from varuna_capslog.own_data.ready_made import ImageFolder, TextFile, TokenFile, write_text
from varuna_capslog.own_data.workload import workload

__all__ = ["ImageFolder", "TextFile", "TokenFile", "workload", "write_text"]
