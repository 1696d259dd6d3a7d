"""The settings that must not change between a checkpoint and the run that continues it, and the error for each.

Checked before a run's folder is written to, so that a refused command leaves it unchanged, and by every rank before it
loads. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from varuna_capslog.base.errors import CapslogError, RunFinding, settle
from varuna_capslog.config.settings import Config
from varuna_capslog.training.manifest import read_manifest

__all__ = ["check_continues", "check_folder", "check_samples", "folder_findings", "run_constants"]


def run_constants(config: Config, grains: Sequence[int] = ()) -> dict[str, Any]:
    """Return the keys of `train` that fix the losses, with their values, and the grains (`plans.parts.grains_of`)."""
    train = config.train
    return {
        **({"grains": list(grains)} if grains else {}),
        "seed": train.seed,
        "minibatch_size": train.minibatch_size,
        "microbatch_size": train.microbatch_size,
        "accumulation_blocks": config.num_blocks,
        "precision": train.precision,
        "weights": train.weights,
        "moments": train.moments,
        **({"loss_scale": train.loss_scale} if train.precision == "float16" else {}),
    }


def check_continues(
    config: Config,
    model: str | None,
    manifest: Mapping[str, Any],
    path: Path,
    grains: Sequence[int] = (),
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise CapslogError if a run of `config` cannot continue the checkpoint at `path`; see `_differences`."""
    settle(map(RunFinding.of_error, _differences(config, model, manifest, path, grains, facts)))


def _differences(
    config: Config,
    model: str | None,
    manifest: Mapping[str, Any],
    path: Path,
    grains: Sequence[int],
    facts: Mapping[str, Any],
) -> Iterator[CapslogError]:
    """Yield the errors that keep a run of `config` from continuing the checkpoint at `path`.

    Args:
        model: the chain's name, None where it is not known.
        grains: of the plan's layers; see `plans.parts.grains_of`.
        facts: of the training data, see `Workload.data_facts`; none where they are not known.
    """
    if model is not None and manifest.get("model") != model:
        yield CapslogError(
            f"{path} was written for the model {manifest.get('model')!r}, the config builds {model!r}; choose another "
            "run_dir, or begin from it with init_from"
        )
        return  # the rest is of another model
    earlier = {"weights": "float32", "moments": "float32"}  # of versions that knew no others
    before = earlier | manifest.get("constants", {})
    if before.get("grains", []) != list(grains):
        yield CapslogError(
            f"{path} was written with the grains {before.get('grains') or 1} of its layers, the plan has "
            f"{list(grains) or 1}; losses would not continue: run a plan of the same grains, or begin a new run with "
            "init_from"
        )
    for name, value in run_constants(config).items():
        if name in before and before[name] != value:
            yield CapslogError(
                f"{path} was written with train.{name}={before[name]}, the config says {value}; losses would not "
                "continue: set it back, or begin a new run with init_from"
            )
    then = manifest.get("data", {})  # of versions that kept none
    for name in then | facts if then and facts else ():
        if then.get(name) != facts.get(name):
            yield CapslogError(
                f"{path} was written with training data whose {name} was {_said(then, name)}, and now it is "
                f"{_said(facts, name)}; losses would not continue: set the data back, or begin a new run with init_from"
            )


def _said(facts: Mapping[str, Any], name: str) -> str:
    return repr(facts[name]) if name in facts else "missing"


def check_samples(samples: int, minibatch_size: int) -> None:
    """Raise CapslogError for training data of less than one minibatch."""
    if samples < minibatch_size:
        raise CapslogError(
            f"the training data has {samples} samples, fewer than train.minibatch_size={minibatch_size}; lower it"
        )


def check_folder(
    config: Config,
    model: str | None,
    grains: Sequence[int] = (),
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise CapslogError if `folder_findings` yields any."""
    settle(folder_findings(config, model, grains, facts))


def folder_findings(
    config: Config, model: str | None, grains: Sequence[int], facts: Mapping[str, Any]
) -> Iterator[RunFinding]:
    """Yield the conflicts between `config.resume` and `run_dir/checkpoints`; damaged checkpoints are ignored here."""
    folder = config.run_dir / "checkpoints"
    folders = sorted(folder.glob("step-*"), reverse=True)
    if config.resume == "never":
        if folders:
            # Their steps would be taken for this run's by the next resume, and pruned with them.
            raise CapslogError(
                f"resume=never, but {folder} holds the checkpoints of an earlier run; choose another run_dir, or "
                "remove them"
            )
        return
    for path in folders if config.resume == "auto" else [Path(config.resume)]:
        try:
            manifest = read_manifest(path)
        except CapslogError:
            continue
        yield from map(RunFinding.of_error, _differences(config, model, manifest, path, grains, facts))
        return
