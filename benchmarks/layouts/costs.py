"""Costs of the models of published layouts, fixed before any plan is asked for: `costs.json`.

Each model is estimated for H100s from its published sizes: all bfloat16, AdamW. 16-bit matrix
products run at 0.4, 0.5 and 0.7 of the card's 16-bit peak rate; everything else, fused attention too, is as in the
library's estimates. `costs.json` has, for each model and division of its stages over cards, the layers of one card:
seconds of a forward and a backward at each rate, and the bytes of weights and states, of what a microbatch saves, and
of what an action needs besides. `layouts.py` judges by these alone. The planners get the whole profiles, which this
command writes into a folder again; their digests are in `costs.json`, and `layouts.py` asks for equal layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "models_2026"))

from rows import MODELS, ROWS, Model
from sizes import write_config

from varuna_capslog.base.gpus import GPUS
from varuna_capslog.commands.questions import ModelFlags, config_of_model, settled
from varuna_capslog.config.parallel import Divisors
from varuna_capslog.profiles.divided import divided
from varuna_capslog.profiles.record import Profile, read_profile, write_profile
from varuna_capslog.profiling.estimate import Memo, estimate_config
from varuna_capslog.profiling.estimation.rates import Speed, speed_of

COSTS = Path(__file__).with_name("costs.json")
RATES = (0.4, 0.5, 0.7)
CARD = "h100-80gb"


def speed_at(rate: float) -> Speed:
    """Return the card's speed with 16-bit products at this part of the peak; slower ones of odd sizes stay slower."""
    speed, least = speed_of("cuda", CARD), 1 / (rate * GPUS[CARD].half_flops)
    products = {
        kind: max(least, seconds) if kind != "product half" else least
        for kind, seconds in speed.seconds_of.items()
        if kind.startswith("product half")
    }
    return dataclasses.replace(speed, name=f"{CARD}, products at {rate}", seconds_of=dict(speed.seconds_of) | products)


def write_profiles(name: str, model: Model, folder: Path) -> None:
    """Estimate a model at each rate."""
    with tempfile.TemporaryDirectory() as home:
        if model.kind is None:
            write_config(model.sizes_of or name, Path(home))
        else:
            import transformers

            config = getattr(transformers, f"{model.kind}Config")(
                **model.keys, dtype="bfloat16", architectures=[model.architecture]
            )
            config.save_pretrained(home)
        text = Path(home) / "config.json"
        predictions = {"num_nextn_predict_layers": model.predictions}
        text.write_text(json.dumps(json.loads(text.read_text()) | predictions))
        words = ["dtype=bfloat16"]
        flags = ModelFlags(folder=Path(home), device=f"cuda:{CARD}", sequence=model.tokens, arguments=words)
        config = config_of_model(
            settled(flags), {"pipeline.devices": 1, "model.name": name, "train.microbatch_size": model.samples}, 64
        )
        memo = Memo()
        for rate in RATES:
            memo.estimators.clear()
            memo.speeds["cuda", CARD, config.train.threads] = speed_at(rate)
            write_profile(folder / f"{name}-{rate}.json", estimate_config(config, None, memo))


def divided_by(profile: Profile, parallel: str) -> Profile:
    """Return the profile of one card; parallel: as `--parallel`, "" for undivided stages. Messages take no time."""
    divisors = Divisors.of(parallel) if parallel else None
    return profile if divisors is None else divided(profile, divisors)


def costs_of(profile: Profile) -> list[tuple[str, list[int], list[float]]]:
    """Return each layer's name, bytes (static, saved, working), and seconds of a forward and of a backward."""
    alone = {row.layers[0]: row for row in profile.observations if row.layers[1] - row.layers[0] == 1}
    rows = []
    for place, layer in enumerate(profile.layers):
        static, saved = layer.static_bytes or 0, layer.saved_bytes or 0
        seconds = [float(f"{value:.6g}") for value in (layer.forward_seconds or 0.0, layer.backward_seconds or 0.0)]
        rows.append((layer.name, [static, saved, max(0, alone[place].peak_bytes - static - saved)], seconds))
    return rows


def layers_of(profiles: dict[float, Profile]) -> list[list[Any]]:
    """Return runs of equal layers: count, name of the first, bytes, and seconds at each rate."""
    of_rates = zip(*(costs_of(profiles[rate]) for rate in RATES), strict=True)
    rows = [(layer[0][0], layer[0][1], [seconds for _, _, seconds in layer]) for layer in of_rates]
    groups = itertools.groupby(rows, key=lambda row: row[1:])
    return [[len(members), members[0][0], *costs] for costs, group in groups if (members := list(group))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the profiles; those that are there are not made again")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        begun = time.process_time()
        paths = {rate: args.folder / f"{name}-{rate}.json" for rate in RATES}
        if not all(path.exists() for path in paths.values()):
            write_profiles(name, MODELS[name], args.folder)
        profiles = {rate: read_profile(path) for rate, path in paths.items()}
        costs = json.loads(COSTS.read_text()) if COSTS.exists() else {}
        costs[name] = {"digests": [profiles[rate].digest for rate in RATES], "cards": {}}
        for parallel in sorted({row.parallel for row in ROWS if row.model == name}):
            of_card = {rate: divided_by(profile, parallel) for rate, profile in profiles.items()}
            costs[name]["cards"][parallel] = layers_of(of_card)
        COSTS.write_text(json.dumps(costs, indent=None, sort_keys=True).replace("}, ", "},\n") + "\n")
        print(f"{name}: {time.process_time() - begun:.0f} processor seconds", flush=True)


if __name__ == "__main__":
    main()
