"""The variants of a config, checked once where a run starts, so that all its ranks compute the layers alike.

`start/given_plan` and `api.training` call this. The workers read the config.yaml of the run's folder, which holds what
has passed.
"""

from __future__ import annotations

from collections.abc import Callable

from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config

__all__ = ["with_checked_variants"]


def with_checked_variants(config: Config, say: Callable[[str], object] = lambda line: None) -> Config:
    """The config without the variants of layers that fail their check; the same config where all pass.

    Args:
        say: told one sentence for each kind of layer whose variant fails, or was checked on smaller inputs.

    Raises:
        CapslogError: an unknown variant, a pattern that matches nothing, a class that `numerics` does not allow.
    """
    if not config.variants:
        return config
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.profiling.variant_check import checked_choices

    passed, checks = checked_choices(load_workload(config), config.train.microbatch_size)
    for one in checks:
        if one.fault or one.smaller:
            say(one.sentence())
    if passed == config.variants:
        return config
    decided = section(Config, config.model_dump(mode="json") | {"variants": passed}, "")
    decided._source, decided._given = config._source, config._given
    return decided
