"""Rules of transformers' `generate(do_sample=False)` for `decoder`: padding of prompts, and the generation config.

A key of a model's generation config changes the logits as in `generate` (by transformers' own processors), has no
effect on greedy decoding, or is refused by name before the first token. A request is decoded as `generate` decodes it
alone: lengths count only its own tokens, and no processor gets padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError, needed

__all__ = ["TokenChoice", "check_prompts", "generation_keys", "unpadded"]

Prompts = Sequence[Sequence[int]] | Tensor
"""Token numbers of each request, or [requests, tokens]."""


# -- Prompts


def unpadded(model: Any, prompts: Prompts, attention_mask: Prompts | None = None) -> list[list[int]]:
    """Return the tokens of each request without padding, as `generate` does. Padding has a 0 in the mask; without a
    mask, it is the model's padding token, unless that is also an end token.

    Raises:
        CapslogError: prompts or mask of another form.
    """
    requests = _rows(prompts, "prompts")
    if attention_mask is None:
        pad = _setting(model, "pad_token_id")
        dropped = set() if pad is None else {pad} - _end_tokens(model)
        return [[token for token in request if token not in dropped] for request in requests]
    masks = _rows(attention_mask, "attention_mask")
    if [len(mask) for mask in masks] != [len(request) for request in requests]:
        raise CapslogError("attention_mask has not the form of prompts; give a 1 or a 0 for every token")
    return [
        [token for token, counts in zip(request, mask, strict=True) if counts]
        for request, mask in zip(requests, masks, strict=True)
    ]


def _rows(rows: Any, name: str) -> list[list[int]]:
    """Return prompts or masks as a list for every request. Raises CapslogError for other forms."""
    if isinstance(rows, dict) or hasattr(rows, "keys"):
        raise CapslogError(
            f"{name} is a {type(rows).__name__}; give its input_ids, and its attention_mask by that name"
        )
    if isinstance(rows, Tensor):
        if rows.ndim != 2 or rows.is_floating_point():
            form = f"{rows.dtype} {list(rows.shape)}".removeprefix("torch.")
            raise CapslogError(
                f"{name} is a tensor of {form}; give whole numbers [requests, tokens], or a list of lists"
            )
        return [list(map(int, row)) for row in rows.tolist()]
    lists = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    wrong = next((row for row in lists if isinstance(row, str) or not isinstance(row, Sequence)), None)
    if wrong is not None:
        raise CapslogError(f"{name} has {wrong!r} for a request; give a list of token numbers for each")
    return [list(row) for row in lists]


def check_prompts(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Raise CapslogError without prompts, and for a prompt without tokens, with unknown tokens, or that is too long."""
    fields.whole(new_tokens, "new_tokens", 1)
    if not prompts:
        raise CapslogError("there is no prompt to decode; give at least one, a list of token numbers")
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    limit = getattr(model.config, "max_position_embeddings", None)
    for place, prompt in enumerate(prompts):
        if not len(prompt):
            raise CapslogError(f"prompt {place} is empty; give it a token, such as that of the beginning")
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise CapslogError(f"prompt {place} has token {wrong}, but the model knows 0 to {vocabulary - 1}")
        if limit is not None and len(prompt) + new_tokens > limit:
            raise CapslogError(
                f"prompt {place} of {len(prompt)} tokens and {new_tokens} new ones are more than the {limit} "
                "positions of the model; shorten one of them"
            )


# -- The generation config


@dataclass(frozen=True)
class _Request:
    """Arguments of processors. prompt: [1, S]. new_tokens: most new tokens. ends: end tokens; None: there are none."""

    prompt: Tensor
    new_tokens: int
    ends: Tensor | None
    config: Any

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return int(self.prompt.shape[1])


def _begin_suppressed(kinds: Any, tokens: Any, request: _Request) -> Any:
    forced = request.length == 1 and request.config.forced_bos_token_id is not None
    return kinds.SuppressTokensAtBeginLogitsProcessor(tokens, request.length + forced, request.prompt.device)


def _min_length(kinds: Any, length: int, request: _Request) -> Any:
    if request.ends is None or request.config.min_new_tokens is not None:
        return None  # min_new_tokens has precedence
    return kinds.MinLengthLogitsProcessor(length, request.ends, request.prompt.device)


def _min_new_tokens(kinds: Any, least: int, request: _Request) -> Any:
    if request.ends is None:
        return None
    return kinds.MinNewTokensLengthLogitsProcessor(request.length, least, request.ends, request.prompt.device)


def _decay(kinds: Any, decay: Any, request: _Request) -> Any:
    if request.ends is None:
        raise ValueError("it needs an eos_token_id")
    return kinds.ExponentialDecayLengthPenalty(decay, request.ends, request.length)


def _forced_end(kinds: Any, token: Any, request: _Request) -> Any:
    last = request.length + request.new_tokens
    return kinds.ForcedEOSTokenLogitsProcessor(last, token, request.prompt.device)


_Maker = Callable[[Any, Any, _Request], Any]
_HONOURED: dict[str, tuple[Any, _Maker]] = {
    "sequence_bias": (None, lambda kinds, bias, _: kinds.SequenceBiasLogitsProcessor(bias)),
    "encoder_repetition_penalty": (
        1,
        lambda kinds, penalty, request: kinds.EncoderRepetitionPenaltyLogitsProcessor(penalty, request.prompt),
    ),
    "repetition_penalty": (1, lambda kinds, penalty, _: kinds.RepetitionPenaltyLogitsProcessor(penalty)),
    "no_repeat_ngram_size": (0, lambda kinds, size, _: kinds.NoRepeatNGramLogitsProcessor(size)),
    "encoder_no_repeat_ngram_size": (
        0,
        lambda kinds, size, request: kinds.EncoderNoRepeatNGramLogitsProcessor(size, request.prompt),
    ),
    "bad_words_ids": (None, lambda kinds, words, request: kinds.NoBadWordsLogitsProcessor(words, request.ends)),
    "min_length": (0, _min_length),
    "min_new_tokens": (0, _min_new_tokens),
    "forced_bos_token_id": (None, lambda kinds, token, _: kinds.ForcedBOSTokenLogitsProcessor(token)),
    "forced_eos_token_id": (None, _forced_end),
    "remove_invalid_values": (None, lambda kinds, _, __: kinds.InfNanRemoveLogitsProcessor()),
    "exponential_decay_length_penalty": (None, _decay),
    "suppress_tokens": (
        None,
        lambda kinds, tokens, request: kinds.SuppressTokensLogitsProcessor(tokens, request.prompt.device),
    ),
    "begin_suppress_tokens": (None, _begin_suppressed),
    "renormalize_logits": (None, lambda kinds, _, __: kinds.LogitNormalization()),
}
"""Keys in the order in which `generate` applies them; for each, the setting that has no effect, as None and False have
none, and a function that makes the processor.
"""
_REFUSED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "use_mtp": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "constraints": None,
    "force_words_ids": None,
    "stop_strings": None,
    "max_time": None,
    "token_healing": None,
    "watermarking_config": None,
}
"""Keys for other searches, text, clocks or watermarks; for each, the setting that has no effect (as None and False)."""
_WITHOUT_EFFECT = frozenset(
    " ".join(
        [
            # sampling
            "do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff",
            # beams and assistants, which are refused
            "early_stopping length_penalty diversity_penalty num_beam_groups low_memory is_assistant speculation_type",
            "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind",
            "target_lookbehind assistant_ensemble_weight max_matching_ngram_size",
            # replaced by the argument `new_tokens`
            "max_length max_new_tokens",
            # how `generate` computes and what it returns
            "use_cache cache_implementation cache_config max_cache_len compile_config disable_compile",
            "prefill_chunk_size continuous_batching_config output_attentions output_hidden_states output_scores",
            "output_logits return_dict_in_generate",
            # tokens that other functions read, and notes
            "pad_token_id bos_token_id eos_token_id decoder_start_token_id transformers_version",
        ]
    ).split()
)


def generation_keys(model: Any) -> dict[str, Any]:
    """Return the keys of the model's generation config that change the logits, with their settings.

    Raises:
        CapslogError: a key that decoding on ranks does not know.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return {}
    # other keys than those of transformers' class are the checkpoint's own, and `generate` does not read them
    plain = {key: _REFUSED.get(key, unset) for key, unset in vars(type(config)()).items() if not key.startswith("_")}
    set_keys = {key: getattr(config, key, None) for key in plain}
    for key, setting in set_keys.items():
        unsupported = key not in _HONOURED and key not in _WITHOUT_EFFECT
        quantized = key == "cache_implementation" and setting == "quantized"
        if quantized or (unsupported and not _idle(setting, plain[key])):
            raise CapslogError(
                f"the model's generation config says {key}={setting!r}, which decoding over ranks does not know; set "
                f"model.generation_config.{key} = {plain[key]!r}, or use transformers' generate on one device"
            )
    return {key: set_keys[key] for key in _HONOURED if key in set_keys and not _idle(set_keys[key], _HONOURED[key][0])}


class TokenChoice:
    """Choice of the next tokens of requests, by the model's generation config.

    Args:
        prompts: of the requests that this rank decodes.
        new_tokens: largest number of new tokens of each request.

    Raises:
        CapslogError: an unknown key of the config, or a setting that transformers refuses.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, device: torch.device) -> None:
        keys = generation_keys(model)
        self.ends = _end_tokens(model)
        ends = torch.tensor(sorted(self.ends), device=device) if self.ends else None
        self._tokens: list[Tensor] = []
        self._processors: list[list[Callable[[Tensor, Tensor], Tensor]]] = []
        for prompt in prompts if keys else ():
            tokens = torch.tensor([list(prompt)], device=device)
            request = _Request(tokens, new_tokens, ends, model.generation_config)
            self._tokens.append(tokens)
            self._processors.append(_processors(keys, request))

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next tokens [requests] for logits [requests, vocabulary], compared in float32 as in `generate`."""
        logits = logits.float()
        if not self._processors:
            return logits.argmax(-1)
        chosen = []
        for place, processors in enumerate(self._processors):
            scores = logits[place : place + 1]
            for process in processors:
                scores = process(self._tokens[place], scores)
            chosen.append(scores.argmax(-1))
            self._tokens[place] = torch.cat([self._tokens[place], chosen[-1][None]], 1)
        return torch.cat(chosen)


def _processors(keys: dict[str, Any], request: _Request) -> list[Callable[[Tensor, Tensor], Tensor]]:
    with needed("decoding over ranks"):
        from transformers.generation import logits_process
    processors = []
    for key, setting in keys.items():
        try:
            processors.append(_HONOURED[key][1](logits_process, setting, request))
        except (ValueError, TypeError) as error:
            raise CapslogError(
                f"the model's generation config says {key}={setting!r}, which transformers refuses: {error}; correct "
                f"model.generation_config.{key}"
            ) from error
    return [processor for processor in processors if processor is not None]


def _idle(setting: Any, without_effect: Any) -> bool:
    return setting is None or setting is False or (without_effect is not None and setting == without_effect)


def _setting(model: nn.Module, key: str) -> Any:
    return getattr(getattr(model, "generation_config", None), key, None)


def _end_tokens(model: Any) -> set[int]:
    token_ids = _setting(model, "eos_token_id")
    return set() if token_ids is None else {token_ids} if isinstance(token_ids, int) else set(map(int, token_ids))
