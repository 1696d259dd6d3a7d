"""`capslog.estimate`: bytes and seconds of each layer of a model, without the device and without any run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from varuna_capslog.profiles.record import Profile, write_profile
from varuna_capslog.reports.tables import profile_table
from varuna_capslog.start.ordinary import OrdinaryModel, ordinary_config

if TYPE_CHECKING:
    import os

    from torch import Tensor, nn

    from varuna_capslog.config.settings import Config
    from varuna_capslog.model.chain import Chain

    Model = nn.Module | Chain | str
    Sample = Tensor | Sequence[Any] | Mapping[str, Any] | str

__all__ = ["Estimate", "estimate", "estimated"]


class Estimate(Profile):
    """A `Profile` that prints as a table, also in a notebook; `capslog.plan` takes it in place of a model."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file, which `capslog plan --profile` and `read_profile` read."""
        write_profile(path, self)

    def __str__(self) -> str:
        return profile_table(self).text()

    def _repr_html_(self) -> str:
        return profile_table(self).html()


def estimate(
    model: Model,
    sample: Sample | None = None,
    *,
    device: str | None = None,
    cut_points: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Estimate:
    """Estimate bytes and seconds of every layer for one training step, from the shapes alone.

    Nothing of the model is run or changed, and `device` need not be there.

    Args:
        model: an nn.Module on any device (the meta device too: no memory is needed for weights), a `Chain`, or
            `"package.module:function"`, a function that returns such a model.
        sample: example inputs, batch first: a tensor, a tuple, or a dict by name; or their shapes as text, such as
            `"x=float32[8,3,224,224]"`, or a list of such texts. The batch is one microbatch. Values do not matter.
        device: `"cpu"`, `"cuda"`, or a kind of GPU such as `"cuda:a100-80gb"`; default: the GPU of this machine, or its
            CPU where it has none.
        cut_points: names of submodules to cut before; default: every repeated block.
        settings: further keys of a config, such as `{"train.precision": "bfloat16"}`.

    Returns:
        Bytes and seconds per layer. The loss is the model's output `loss`, or else the mean square of its output.

    Raises:
        CapslogError: the model cannot be captured, an input is missing or does not fit it, a key or device is unknown.
    """
    config = ordinary_config(OrdinaryModel(model, sample, cut_points), {"devices": 1}, device=device, settings=settings)
    return estimated(config)


def estimated(config: Config, memo: Any = None) -> Estimate:
    """Return the estimate of a config; memo: see `start.prepare.estimate_memo`."""
    from varuna_capslog.start.prepare import profile_run

    return Estimate(**vars(profile_run(config, show=False, memo=memo)))
