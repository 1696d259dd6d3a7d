"""The function that `workload: varuna_capslog.model_workload:workload` names, in configs and in the folders of runs."""

from varuna_capslog.model.model_workload import workload

__all__ = ["workload"]
