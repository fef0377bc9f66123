"""`CausalLM`: a language model of transformers as a stepper."""

import collections
import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import get_layer_types_and_kwargs

from .._base.arguments import check_instance, check_int
from ..errors import InvalidInput
from ..serve import Done, Stepper
from ._request import Completion, FinishReason, Prompt, Token
from ._row import Row
from ._sampling import Choice, choose
from ._slots import Slots

_Work: TypeAlias = list[tuple[Row, int]]  # rows, with how many tokens to compute


class CausalLM(Stepper[Prompt, Any, Token]):
    """A causal language model of transformers as a `Stepper`.

    Each step generates one token of each request whose prompt is computed. The same step computes
    at most `prefill_tokens` tokens of prompts, so a long prompt does not hold up other requests.

    Greedy tokens are those of `model.generate` for the prompt alone. They may differ if two tokens
    are equally likely in the model's precision. That happens in bfloat16: the shape of a batch
    decides how sums are rounded.

    The model's generation config gives the end-of-sequence tokens. Its other settings are ignored.

    Args:
        model: A `PreTrainedModel` in evaluation mode, on one device, with attention by "sdpa" or
            "eager".
        tokenizer: The model's tokenizer. None: prompts must be ids, and texts are empty.
        prefill_tokens: The most tokens of prompts that a step computes, padding included.

    Raises:
        TypeError: The model or the tokenizer has a wrong type.
        ValueError: The model cannot run in slots. For example, it has a recurrent state or an
            encoder, or it computes positions itself (ALiBi), or it is in training mode.

    Example:
        >>> import transformers
        >>> from aiopar.transformers import CausalLM, Prompt
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=99, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     intermediate_size=8)
        >>> model = CausalLM(transformers.LlamaForCausalLM(config).eval())
        >>> state = model.start(Prompt([1, 2, 3], max_tokens=2, ignore_eos=True))
        >>> [first] = model.step([state])
        >>> [last] = model.step([state])
        >>> [token.id for token in last.result.tokens] == [first.id, last.part.id]
        True
    """

    resumable = True

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, *, prefill_tokens: int = 128
    ) -> None:
        _check_model(model)
        self._model = model
        self._tokenizer = tokenizer
        if tokenizer is not None:
            check_instance("tokenizer", tokenizer, PreTrainedTokenizerBase)
        self._prefill_tokens = check_int("prefill_tokens", prefill_tokens, at_least=1)
        self._config = model.config.get_text_config(decoder=True)
        self._context = _context(self._config)
        self._windows = _windows(self._config)
        ends = model.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._cache = Slots()
        self._rows: list[Row] = []  # by slot

    @property
    def device(self) -> torch.device:
        """The model's device; `ContinuousBatcher` runs the stepper on a worker of it."""
        return self._model.device

    def start(self, item: Prompt) -> Row:
        """See `Stepper.start`.

        Raises:
            InvalidInput: The prompt is empty, or has an id that the model does not have. Or prompt
                and `max_tokens` together exceed the model's context.
        """
        if not isinstance(item, Prompt):
            raise TypeError(f"CausalLM needs aiopar.transformers.Prompt, not {type(item).__name__}")
        if self._tokenizer is None and (isinstance(item.prompt, str) or item.stop):
            raise InvalidInput("text prompts and stop strings need a tokenizer")
        ids = (
            self._tokenizer(item.prompt).input_ids if isinstance(item.prompt, str) else item.prompt
        )
        if not ids:
            raise InvalidInput("the prompt has no tokens")
        if not 0 <= min(ids) <= max(ids) < self._config.vocab_size:
            raise InvalidInput(f"token ids must be from 0 to {self._config.vocab_size - 1}")
        if self._context and len(ids) + item.max_tokens > self._context:
            raise InvalidInput(
                f"the prompt has {len(ids)} tokens, and max_tokens is {item.max_tokens}: together "
                f"more than the model's context of {self._context} tokens"
            )
        return Row(item, list(ids), self._tokenizer)

    def resume(self, item: Prompt, parts: Sequence[Token]) -> Row:
        """Make the state of a request that goes on after `parts`; see `Stepper`."""
        row = self.start(item)
        for token in parts:
            row.text.push(token.id)
            row.ids.append(token.id)
            row.tokens.append(token)
        return row

    def held(self, state: Row) -> float:
        """The tokens of keys and values that the request holds when all its ids are computed."""
        return len(state.ids)

    def stop(self, state: Row) -> None:
        """Free the slot of a request; the last row moves into it."""
        if state.slot is None:
            return
        last = self._rows.pop()
        with torch.inference_mode():
            if self._rows:
                self._cache.free(state.slot, len(self._rows), max(state.written, last.written))
            else:
                self._cache.clear()
        if last is not state:
            self._rows[state.slot] = last
            last.slot = state.slot
        state.slot, state.cached, state.written = None, 0, 0

    def step(self, states: list[Row]) -> list[Token | Done[Completion] | Exception | None]:
        """Generate the next token of each request; see `Stepper.step`."""
        works = [work for work in self._plan(states) if work]
        with torch.inference_mode():
            # States change only after this line, so that a step that fails can be repeated.
            choices = [choose(*self._forward(work)) for work in works]
        for row, count in itertools.chain(*works):
            row.cached += count
        chosen = collections.ChainMap(*choices)
        return [self._part(row, chosen[row]) if row in chosen else None for row in states]

    def _plan(self, states: list[Row]) -> tuple[_Work, _Work]:
        """Plan a step: the rows that compute one token, and the rows that compute prompts."""
        prompts: _Work = []
        width = 0
        for row in states:
            count = min(row.missing, self._prefill_tokens)
            wider = max(width, count)
            if row.missing > 1 and wider * (len(prompts) + 1) <= self._prefill_tokens:
                prompts.append((row, count))
                width = wider
        return [(row, 1) for row in states if row.missing == 1], prompts

    def _forward(self, work: _Work) -> tuple[dict[Row, int], torch.Tensor]:
        """Compute the next tokens of rows.

        Returns the rows that are ready for their next token, and the logits. Each row has the
        index of its logits.
        """
        for row, _ in work:
            if row.slot is None:
                row.slot = len(self._rows)
                self._rows.append(row)
        work = sorted(work, key=lambda each: each[0].slot or 0)
        width = max(count for _, count in work)
        table = []
        for row, count in work:
            row.written = max(row.written, row.cached + width)
            tokens = row.ids[row.cached : row.cached + count]
            table.append([row.slot, row.cached, count, *tokens, *[0] * (width - count)])
        numbers = torch.tensor(table, device=self._model.device)
        slots, cached, counts, ids = torch.split(numbers, [1, 1, 1, width], 1)
        places = cached + torch.arange(width, device=ids.device)
        # Padding is written where the row's next tokens will be: the mask hides these places.
        positions = torch.minimum(places, cached + counts - 1)
        length = max(row.cached + count for row, count in work)
        self._cache.capacity = len(self._rows), max(row.written for row in self._rows)
        self._cache.target = slots, places
        dense = all(row.slot == i for i, (row, _) in enumerate(work))  # then no copy is needed
        self._cache.source = slice(0, len(work)) if dense else slots[:, 0], slice(0, length)
        ends = sorted({count - 1 for row, count in work if row.missing == count}) or [0]
        logits = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask(positions, length),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(ends, device=ids.device),
        ).logits
        ready = {
            row: i * len(ends) + ends.index(count - 1)
            for i, (row, count) in enumerate(work)
            if row.missing == count
        }
        return ready, logits.flatten(0, 1)

    def _mask(self, positions: torch.Tensor, length: int) -> Any:
        """The attention mask, in the form that the model's own code makes."""
        keys = torch.arange(length, device=positions.device)
        queries = positions[:, None, :, None]
        causal = keys <= queries
        masks = {}
        for kind, window in self._windows.items():
            mask = causal
            if kind == "sliding_attention":
                mask = causal & (keys > queries - window)
            elif kind == "chunked_attention":
                mask = causal & (keys // window == queries // window)
            if self._config._attn_implementation == "eager":
                dtype = self._model.dtype
                mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
            masks[kind] = mask
        return masks if getattr(self._config, "layer_types", None) else mask

    def _part(self, row: Row, choice: Choice) -> Token | Done[Completion] | Exception:
        """Append the chosen token to the row."""
        if not math.isfinite(choice.peak):
            return FloatingPointError(f"the largest of the model's logits is {choice.peak}")
        row.ids.append(choice.id)
        ended = choice.id in self._ends and not row.prompt.ignore_eos
        text = "" if ended else row.text.push(choice.id)
        reason: FinishReason | None = "stop" if ended or row.text.stopped else None
        if reason is None and len(row.tokens) + 1 == row.prompt.max_tokens:
            reason = "length"
        if reason:
            text += row.text.rest()
        token = Token(choice.id, text, choice.logprob, choice.top_logprobs, reason)
        row.tokens.append(token)
        if reason is None:
            return token
        text = "".join(token.text for token in row.tokens)
        prompt_tokens = len(row.ids) - len(row.tokens)
        return Done(Completion(text, tuple(row.tokens), reason, prompt_tokens), token)


def _check_model(model: Any) -> None:
    """Raise unless the model can run in slots."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise TypeError(f"model must be a causal language model of transformers, not {name}")
    reason = None
    config = model.config.get_text_config(decoder=True)
    taken = inspect.signature(model.forward).parameters
    kinds = get_layer_types_and_kwargs(config)[0]
    if model.config.is_encoder_decoder:
        reason = "it has an encoder"
    elif any(getattr(module, "is_causal", None) is False for module in model.modules()):
        reason = "its tokens attend to later tokens"
    elif model._is_stateful or not {*kinds} <= _KINDS:
        reason = "its layers keep more than keys and values per token, such as a recurrent state"
    elif getattr(config, "alibi", False) or "position_ids" not in taken:
        reason = "it does not take the positions of tokens (ALiBi)"
    elif not {"past_key_values", "logits_to_keep"} <= {*taken}:
        reason = "its forward does not take past_key_values and logits_to_keep"
    elif not (model._supports_sdpa or model._supports_attention_backend):
        reason = "its attention makes its own masks"
    elif config._attn_implementation not in ("sdpa", "eager"):
        reason = f"load it with attn_implementation='sdpa', not {config._attn_implementation!r}"
    elif model.training:
        reason = "it is in training mode: call model.eval()"
    if reason:
        raise ValueError(f"CausalLM cannot run {name}: {reason}")


_KINDS = {"dummy", "full_attention", "sliding_attention", "chunked_attention"}


def _windows(config: Any) -> dict[str, int]:
    """How far the layers of each kind look back."""
    kinds, options = get_layer_types_and_kwargs(config)
    return {kind: each.get("sliding_window", 0) for kind, each in zip(kinds, options, strict=True)}


def _context(config: Any) -> int | None:
    """The most tokens of a prompt and its text. None: no limit."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        # Above this limit the longest row of a batch would change the positions of all rows.
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            limit = rope.get("original_max_position_embeddings", limit)
    return limit
