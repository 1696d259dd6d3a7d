"""`capslog evaluate`: score a run's best checkpoint on its validation data, over the run's own pipeline."""

from __future__ import annotations

import sys

import typer

from varuna_capslog.commands.arguments import AsJson, RunDirectory, print_json, print_table, run_config

__all__ = ["evaluate"]


def evaluate(run_dir: RunDirectory, as_json: AsJson = False) -> None:
    """Score the best checkpoint of a run; the scores are also written to RUN_DIR/evaluation.json."""
    from varuna_capslog.base import files
    from varuna_capslog.base.supervisor import Supervisor, reserve

    settings = run_config(run_dir)
    path = run_dir / "evaluation.json"
    with reserve(run_dir):
        path.unlink(missing_ok=True)
        Supervisor(
            run_dir,
            [sys.executable, "-m", "varuna_capslog.start.worker", str(run_dir), "--evaluate"],
            settings.world_size,
            environment={"OMP_NUM_THREADS": str(settings.train.threads)},
            say=lambda line: typer.echo(f"capslog: {line}", err=True),
        ).run()
    scores = files.read_json(path)
    if as_json:
        print_json(scores)
        return
    rows = [
        [name, f"{value:.4f}" if isinstance(value, float) else str(value)]
        for name, value in scores.items()
        if not isinstance(value, (dict, list))
    ]
    print_table(f"scores of {run_dir}", ("score", "value"), rows, left=(0, 1))
