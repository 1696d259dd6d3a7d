"""Any data-parallel program as an elastic run: what a training script imports is here, see docs/scripts.md."""

from varuna_capslog.elastic.script.task import TRUTH, Group, Script, main, train

__all__ = ["TRUTH", "Group", "Script", "main", "train"]
