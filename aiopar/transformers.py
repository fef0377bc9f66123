"""`CausalLM`: language models of transformers, stepped by `ContinuousBatcher`."""

import collections
import inspect
import itertools
import math
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

try:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import get_layer_types_and_kwargs
except ModuleNotFoundError as error:
    raise ImportError(
        "aiopar.transformers needs transformers: pip install 'aiopar[transformers]'"
    ) from error

from ._base.arguments import as_int, check_instance, check_int, check_number
from .errors import InvalidInput
from .serve import Done, Stepper

__all__ = ["CausalLM", "Completion", "Prompt", "Token"]

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request for `CausalLM`.

    Args:
        prompt: Text, or token ids. Text is tokenized as `tokenizer(text)` does it, special tokens
            included; for a chat, give the ids of `tokenizer.apply_chat_template`.
        max_tokens: How many tokens to generate at most.
        temperature: 0 takes the most likely token; above 0, tokens are drawn.
        top_k: Draw from the `top_k` most likely tokens only. 0: from all.
        top_p: Draw from the fewest tokens whose probabilities sum up to `top_p`.
        stop: Strings that end the text. The text does not contain them.
        seed: Makes draws repeatable. They do not depend on what else runs in the batch.
        logprobs: Give each token its log probability, and those of so many alternatives.
        ignore_eos: Go on to `max_tokens`, whatever the model says.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a wrong value.
    """

    prompt: str | Sequence[int]
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: str | Sequence[str] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            ids = tuple(map(operator.index, self.prompt))
            object.__setattr__(self, "prompt", ids)  # the dataclass is frozen
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for text in stop:
            check_instance("stop", text, str)
            if not text:
                raise ValueError(f"stop must be strings that are not empty, got {self.stop!r}")
        check_int("max_tokens", self.max_tokens, at_least=1)
        check_int("top_k", self.top_k, at_least=0)
        if check_number("temperature", self.temperature, zero=True) == math.inf:
            raise ValueError("temperature must be finite")
        if check_number("top_p", self.top_p, zero=False) > 1:
            raise ValueError(f"top_p must be at most 1, got {self.top_p}")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, at_least=0)
        if self.seed is not None:
            as_int("seed", self.seed)


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token: one part of `batcher.stream(Prompt(...))`.

    Attributes:
        id: The token's id.
        text: The text that has become sure by this token. Empty while a character is incomplete,
            or while a stop string may have begun.
        logprob: The log probability, before temperature, `top_k` and `top_p`. None: not asked for.
        top_logprobs: Ids and log probabilities of the most likely tokens, if asked for.
        finish_reason: Of the last token: that of its `Completion`.
    """

    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of `await batcher(Prompt(...))`.

    Attributes:
        text: The texts of `tokens`, joined.
        tokens: The generated tokens. The last one is the end-of-sequence token if that ended it.
        finish_reason: "stop": an end-of-sequence token or a stop string; "length": `max_tokens`.
        prompt_tokens: How many tokens the prompt has.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    prompt_tokens: int


class CausalLM(Stepper[Prompt, Any, Token]):
    """A causal language model of transformers as a `Stepper`.

    Each step generates one token of each request, and computes at most `prefill_tokens` tokens of
    prompts: a long prompt holds up nobody. Greedy tokens are those of `model.generate` for the
    prompt alone. They may differ where two tokens are equally likely to the model's precision,
    which happens in bfloat16: the shape of a batch decides how sums are rounded.

    Of the model's generation config, the end-of-sequence tokens are used, and nothing else.

    Args:
        model: A `PreTrainedModel` in evaluation mode, on one device, with attention by "sdpa" or
            "eager".
        tokenizer: The model's tokenizer. None: prompts are ids, and texts are empty.
        prefill_tokens: How many tokens of prompts a step computes, padding included.

    Raises:
        TypeError: The model or the tokenizer is of another kind.
        ValueError: The model cannot run in slots: it has a recurrent state, positions that it
            computes itself (ALiBi), or an encoder; or it is in training mode.

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
        self._cache = _Slots()
        self._rows: list[_Row] = []  # by slot

    @property
    def device(self) -> torch.device:
        """The model's device; `ContinuousBatcher` runs the stepper on a worker of it."""
        return self._model.device

    def start(self, item: Prompt) -> "_Row":
        """See `Stepper.start`.

        Raises:
            InvalidInput: The prompt is empty, has an id that the model lacks, or is too long for
                the model together with `max_tokens`.
        """
        if not isinstance(item, Prompt):
            raise TypeError(f"CausalLM needs aiopar.transformers.Prompt, not {type(item).__name__}")
        if self._tokenizer is None and (isinstance(item.prompt, str) or item.stop):
            raise InvalidInput("a prompt of text, and stop strings, need a tokenizer")
        ids = (
            self._tokenizer(item.prompt).input_ids if isinstance(item.prompt, str) else item.prompt
        )
        if not ids:
            raise InvalidInput("the prompt has no tokens")
        if not 0 <= min(ids) <= max(ids) < self._config.vocab_size:
            raise InvalidInput(f"token ids must be from 0 to {self._config.vocab_size - 1}")
        if self._context and len(ids) + item.max_tokens > self._context:
            raise InvalidInput(
                f"{len(ids)} tokens of prompt and {item.max_tokens} of max_tokens are more than "
                f"the {self._context} tokens of the model's context"
            )
        return _Row(item, list(ids), self._tokenizer)

    def resume(self, item: Prompt, parts: Sequence[Token]) -> "_Row":
        """See `Stepper`: a request that goes on after `parts`."""
        row = self.start(item)
        for token in parts:
            row.text.push(token.id)
            row.ids.append(token.id)
            row.tokens.append(token)
        return row

    def held(self, state: "_Row") -> float:
        """How many tokens of keys and values the request holds after its next full step."""
        return len(state.ids)

    def stop(self, state: "_Row") -> None:
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

    def step(self, states: list["_Row"]) -> list[Token | Done[Completion] | Exception | None]:
        """Generate the next token of each request; see `Stepper.step`."""
        works = [work for work in self._plan(states) if work]
        with torch.inference_mode():
            # No state changes before all this is done, so that a step that fails can be repeated.
            choices = [_choose(*self._forward(work)) for work in works]
        for row, count in itertools.chain(*works):
            row.cached += count
        chosen = collections.ChainMap(*choices)
        return [self._part(row, chosen[row]) if row in chosen else None for row in states]

    def _plan(self, states: list["_Row"]) -> "tuple[_Work, _Work]":
        """How many tokens of which rows to compute: of those that decode, and of prompts."""
        prompts: _Work = []
        width = 0
        for row in states:
            count = min(row.missing, self._prefill_tokens)
            wider = max(width, count)
            if row.missing > 1 and wider * (len(prompts) + 1) <= self._prefill_tokens:
                prompts.append((row, count))
                width = wider
        return [(row, 1) for row in states if row.missing == 1], prompts

    def _forward(self, work: "_Work") -> "tuple[dict[_Row, int], torch.Tensor]":
        """Compute the next tokens of rows.

        Returns the rows of which no token is missing, each with the index of its logits.
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
        # Padding lies behind its row, where the row's next tokens will be: nobody attends to it.
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
        """Which keys each token attends to, in the form that the model's own code makes it."""
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

    def _part(self, row: "_Row", choice: "_Choice") -> Token | Done[Completion] | Exception:
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


class _Row:
    """A request: its tokens, and the slot that holds the keys and values of the first of them."""

    __slots__ = ("cached", "ids", "prompt", "seed", "slot", "text", "tokens", "written")

    def __init__(self, prompt: Prompt, ids: list[int], tokenizer: Any) -> None:
        self.prompt = prompt
        self.ids = ids  # of the prompt and of what was generated
        self.tokens: list[Token] = []
        self.text = _Text(tokenizer, ids, prompt.stop)
        self.seed = random.getrandbits(64) if prompt.seed is None else prompt.seed
        self.slot: int | None = None
        self.cached = 0  # so many of `ids` have keys and values
        self.written = 0  # so many places of the slot are not zero

    @property
    def missing(self) -> int:
        """How many tokens have no keys and values yet. The last of them gives the next token."""
        return len(self.ids) - self.cached

    def draw(self) -> float:
        """A number in [0, 1) that depends on the seed and on the number of tokens only."""
        return random.Random(f"{self.seed} {len(self.tokens)}").random()  # noqa: S311  # no secret


_Work: TypeAlias = list[tuple[_Row, int]]  # how many tokens of each row are computed


class _Text:
    """Text from tokens, one by one. It ends before a stop string."""

    def __init__(self, tokenizer: Any, before: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False
        # The text before decides about spaces, so the last tokens that are known are decoded again.
        self._known: list[int] = list(before[-8:])
        self._new: list[int] = []
        self._length = len(self._decoded())  # of the text of the known tokens

    def _decoded(self) -> str:
        ids = self._known + self._new
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return self._tokenizer.decode(ids, **options) if self._tokenizer else ""

    def push(self, token: int) -> str:
        """Return the text that is sure now."""
        self._new.append(token)
        text = self._decoded()
        if len(text) <= self._length or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""  # the token is a special one, or a part of a character
        text = self._held + text[self._length :]
        self._known, self._new = self._new, []
        self._length = len(self._decoded())
        found = [text.index(stop) for stop in self._stop if stop in text]
        self.stopped = bool(found)
        sure = min(found) if found else len(text) - self._overlap(text)
        self._held = "" if found else text[sure:]
        return text[:sure]

    def rest(self) -> str:
        """Return what was held back: no stop string came."""
        rest, self._held = self._held, ""
        return rest

    def _overlap(self, text: str) -> int:
        """How many characters at the end of `text` may begin a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


class _Slots(Cache):
    """Keys and values of all rows: per layer two buffers [slot, position, head, feature].

    The attributes say what the next forward needs.
    """

    capacity: tuple[int, int]  # at least so many slots and positions
    target: tuple[torch.Tensor, torch.Tensor]  # the slots and positions that are written
    source: tuple[Any, slice]  # the slots and positions that are read

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._buffers: dict[int, list[torch.Tensor]] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [row, head, position, feature] of a layer; return those to read."""
        states = [key_states.transpose(1, 2), value_states.transpose(1, 2)]
        old = self._buffers.get(layer_idx) or [new[:0, :0] for new in states]
        buffers = [self._grown(*pair) for pair in zip(old, states, strict=True)]
        self._buffers[layer_idx] = buffers
        for buffer, new in zip(buffers, states, strict=True):
            buffer.index_put_(self.target, new)
        keys, values = (buffer[self.source].transpose(1, 2) for buffer in buffers)
        return keys, values

    def _grown(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The buffer, or a larger one with its content: the next powers of two."""
        slots, places = self.capacity
        if len(buffer) >= slots and buffer.shape[1] >= places:
            return buffer
        slots, places = (
            1 << (max(pair) - 1).bit_length()
            for pair in zip(buffer.shape[:2], self.capacity, strict=True)
        )
        larger = states.new_zeros(slots, places, *states.shape[2:])
        larger[: len(buffer), : buffer.shape[1]] = buffer
        return larger

    def free(self, slot: int, last: int, places: int) -> None:
        """Move the first places of slot `last` into `slot`, and make those of `last` zero.

        Zero, because a NaN would reach the next row in this slot: attention multiplies by 0.
        """
        for buffer in itertools.chain(*self._buffers.values()):
            buffer[slot : slot + 1, :places] = 0
            if slot < last < len(buffer):  # a failed forward may not have reached this layer
                buffer[slot, :places] = buffer[last, :places]
                buffer[last, :places] = 0

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


class _Choice(NamedTuple):
    """The next token of a row, and the largest of its logits."""

    id: int
    peak: float
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


def _choose(ready: dict[_Row, int], logits: torch.Tensor) -> dict[_Row, _Choice]:
    """Choose the next token of each row; a number is the index of its logits."""
    scores = logits.float()
    if scores.device.type == "cpu":
        best = torch.from_numpy(scores.numpy().argmax(-1))  # torch's own takes ten times as long
    else:
        best = scores.argmax(-1)
    peaks = scores.gather(1, best[:, None])[:, 0].tolist()
    for row, i in ready.items():
        if row.prompt.temperature > 0 and math.isfinite(peaks[i]):
            best[i] = _draw(scores[i], row.prompt, row.draw())
    tokens = best.tolist()
    choices = {}
    for row, i in ready.items():
        logprob = top = None
        if row.prompt.logprobs is not None:
            logprobs = scores[i].log_softmax(-1)
            logprob = float(logprobs[tokens[i]])
            values, ids = logprobs.topk(min(row.prompt.logprobs, len(logprobs)))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        choices[row] = _Choice(tokens[i], peaks[i], logprob, top)
    return choices


def _draw(scores: torch.Tensor, prompt: Prompt, chance: float) -> torch.Tensor:
    """Draw a token: the first whose cumulative probability is above `chance`."""
    probabilities = (scores / prompt.temperature).softmax(-1)
    order = None
    if prompt.top_k:
        probabilities, order = probabilities.topk(min(prompt.top_k, len(scores)))
        probabilities /= probabilities.sum()
    elif prompt.top_p < 1:
        # All tokens below this bound together have less than 1 - top_p: no need to sort them.
        order = (probabilities > (1 - prompt.top_p) / len(scores)).nonzero()[:, 0]
        probabilities, by_size = probabilities[order].sort(descending=True)
        order = order[by_size]
    mass = probabilities.cumsum(-1)
    end = len(mass) - 1
    # The nucleus ends with the first token that brings the mass to top_p.
    whole = mass[(mass < prompt.top_p).sum().clamp(max=end)] if prompt.top_p < 1 else mass[-1]
    index = torch.searchsorted(mass, chance * whole, right=True).clamp(max=end)
    return index if order is None else order[index]


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
    elif model._is_stateful or not {*kinds} <= _KINDS:
        reason = "its layers keep a state that is not one of keys and values per token"
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
    """How many tokens the model can take. None: any number."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        # Beyond this bound the longest row of a batch would change the positions of all rows.
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            limit = rope.get("original_max_position_embeddings", limit)
    return limit
