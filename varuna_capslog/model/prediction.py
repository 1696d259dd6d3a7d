"""Layers for multi-token prediction, which a config.json counts (`num_nextn_predict_layers`) and transformers does not
build: for plans alone.

Sources: DeepSeek-V3's report, Sec. 2.2, and Megatron-LM's `multi_token_prediction.py` of 2026. Layer k reads the state
behind layer k - 1 (layer 1: behind the model's last norm) and the embedding of the token k places ahead. Each goes
through its own norm, a matrix projects both together to the width of one, and a decoder block and a norm follow. The
model's head also computes logits and a loss from the state behind each of these layers. Embedding and head are the
model's own: on another stage they are copies whose gradients are summed.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from varuna_capslog.model.names import PREDICTION

__all__ = ["PredictingModel", "with_predictions"]

LOSS_PART = 0.1
"""Weight of the mean loss of these layers, which is added to the model's own loss, as in Megatron."""
_IGNORED = -100
"""Label of a place without a target, as in transformers."""
_log = logging.getLogger(__name__)


def with_predictions(made: nn.Module) -> nn.Module:
    """Return a causal language model of transformers with the prediction layers that its config counts; the same model
    where it counts none, or, with a warning, where they are not blocks of the last decoder block's kind.
    """
    config: Any = getattr(made, "config", None)
    text = None if config is None else config.get_text_config()
    count = getattr(text, "num_nextn_predict_layers", 0)
    if not isinstance(count, int) or count < 1:
        return made
    base: Any = getattr(made, "model", None)
    parts = [getattr(base, name, None) for name in ("layers", "norm", "embed_tokens")]
    # blocks with several streams (hc_mult), or prediction layers with kinds of their own
    own_kind = getattr(text, "hc_mult", 1) > 1 or any(
        name.startswith("mtp_") and isinstance(kinds, list) for name, kinds in vars(text).items()
    )
    if own_kind or None in (*parts, getattr(made, "lm_head", None)):
        _log.warning(
            "the %d layers for multi-token prediction of %s are left out, since they are no blocks of the kind of its "
            "last one (num_nextn_predict_layers in config.json)",
            count,
            type(made).__name__,
        )
        return made
    return PredictingModel(made, count)


class PredictingModel(nn.Module):
    """Causal language model of transformers with layers for multi-token prediction behind its last norm.

    Args:
        made: the model, on any device; its parts are taken over.
        count: number of layers, which are named `prediction_0` and so on.
    """

    def __init__(self, made: Any, count: int) -> None:
        super().__init__()
        self.config: Any = made.config
        self.main_input_name = "input_ids"
        self.model: Any = made.model
        self._predictions = [f"{PREDICTION}{number}" for number in range(count)]
        for number, name in enumerate(self._predictions, start=1):
            setattr(self, name, _Prediction(self.model, number, self.config.get_text_config().hidden_size))
        self.head = _Head(made)
        self.more_cut_points = [*self._predictions, "head"]
        why = "since one stage has all layers for multi-token prediction"
        self.not_parted = {**getattr(made, "not_parted", {}), **dict.fromkeys(self._predictions[1:], why)}

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return {"loss": ...} of token ids and labels, both (samples, tokens)."""
        with _Calls(self.model.layers[-1]) as calls:
            states = [self.model(input_ids=input_ids, use_cache=False).last_hidden_state]
        for name in self._predictions:
            states.append(getattr(self, name)(states[-1], input_ids, calls))
        return {"loss": self.head(states, labels)}


class _Prediction(nn.Module):
    """Layer that predicts the token `ahead` places further than the model does."""

    def __init__(self, base: Any, ahead: int, width: int) -> None:
        super().__init__()
        self._ahead, self.embed_tokens = ahead, base.embed_tokens
        self.token_norm, self.state_norm, self.norm = (copy.deepcopy(base.norm) for _ in range(3))
        weight = base.embed_tokens.weight
        self.projection = nn.Linear(2 * width, width, bias=False, device=weight.device, dtype=weight.dtype)
        self.block = copy.deepcopy(base.layers[-1])

    def forward(self, state: Tensor, input_ids: Tensor, calls: _Calls) -> Tensor:
        tokens = self.embed_tokens(functional.pad(input_ids, (0, self._ahead))[:, self._ahead :])
        joined = torch.cat((self.token_norm(tokens), self.state_norm(state)), dim=-1)
        passed = self.block(self.projection(joined), *calls.positional, **calls.keywords)
        return self.norm(passed[0] if isinstance(passed, tuple) else passed)


class _Head(nn.Module):
    """The model's head and loss, for its own state and that of each prediction layer."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.lm_head = made.lm_head
        self._loss, self._vocabulary = made.loss_function, made.config.get_text_config().vocab_size

    def forward(self, states: list[Tensor], labels: Tensor) -> Tensor:
        losses = []
        for ahead, state in enumerate(states):
            targets = functional.pad(labels, (0, ahead), value=_IGNORED)[:, ahead:]
            losses.append(self._loss(self.lm_head(state), targets, vocab_size=self._vocabulary))
        return losses[0] + LOSS_PART * torch.stack(losses[1:]).mean()


class _Calls:
    """Records a block's arguments other than its state, such as masks and rotary positions."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.positional: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}

    def __enter__(self) -> _Calls:
        self._hook = self._block.register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _note(self, block: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.positional, self.keywords = positional[1:], dict(keywords)
