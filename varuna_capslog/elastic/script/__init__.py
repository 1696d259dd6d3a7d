"""Any data-parallel program as an elastic run: the names that a training script imports; see docs/scripts.md."""

from varuna_capslog.elastic.script.task import TRUTH, Group, Script, main, train

__all__ = ["TRUTH", "Group", "Script", "main", "train"]
