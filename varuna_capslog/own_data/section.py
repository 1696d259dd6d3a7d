"""Keys of a config's `data` section for `workload: varuna_capslog.own_data:workload`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from varuna_capslog.config.settings import FUNCTION, Section

__all__ = ["DataSection"]

_Function = Annotated[str, Field(pattern=f"^{FUNCTION}$")]


class DataSection(Section):
    """A data set of the user's, or a ready-made one, and what is done with its samples."""

    dataset: _Function | None = None
    """`package.module:function`, or a class; called with `arguments`, it returns a map-style dataset."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of dataset, such as {path: book.txt, length: 64}."""

    val: _Function | None = None
    """As dataset, for the validation data; null means no evaluation."""

    val_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of val."""

    collate: _Function | None = None
    """Function from a list of samples to a batch; null means torch's default_collate."""

    inputs: list[str] | None = None
    """Keys of the batch that the model takes (one that its forward does not name is taken by its place); where a batch
    is a tuple, names of its first entries. null means all keys that forward names, or all entries but the last."""

    loss: str | None = Field(None, pattern=f"^(cross_entropy|chunked_cross_entropy|mse|{FUNCTION})$")
    """cross_entropy, chunked_cross_entropy (half its memory, other rounding), mse, or a function f(outputs, batch) that
    returns the mean loss of a microbatch, or a mapping of parts with that as its entry "loss"; null means the output
    `loss` of the model itself."""

    metric: str | None = Field(None, pattern=f"^(accuracy|{FUNCTION})$")
    """accuracy, or a function f(outputs, batch) that returns scores by name; evaluations give their means."""

    sample: _Function | None = None
    """Function from the trained model to a text, which the report shows."""

    workers: int = Field(0, ge=0)
    """Processes of every rank that reads samples; with 0 the rank reads them itself, between its computations."""

    prefetch: int = Field(2, gt=0)
    """Microbatches that each of these processes reads ahead."""

    given: Path | None = None
    """File in which `capslog.train` hands over what it was given as an object."""

    @model_validator(mode="after")
    def _has_data(self) -> DataSection:
        if self.dataset is None and self.given is None:
            raise ValueError("data.dataset is missing; name a function that returns the dataset, as module:function")
        return self
