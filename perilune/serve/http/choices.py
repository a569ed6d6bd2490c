"""One choice of an answer: the engine's Deltas in, the pieces a client sees out.

A piece is the inside of one streamed `choices[i]`; a whole answer is the sum of the pieces, so streaming and not
streaming cannot differ. Text passes a decoder that holds half characters and `Stops` that hold half stop strings;
log-probabilities travel with the text they belong to, so that neither runs ahead of the other.
"""

import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from perilune.chat import CallArguments, CallStart, Content, Event, Parser, Reasoning
from perilune.serve.request import Delta, TokenLogprob
from perilune.serve.stops import Stops
from perilune.tokenizer import StreamDecoder, Tokenizer

Json = dict[str, Any]
Scored = tuple[int, TokenLogprob]  # (characters shown before the token, its log-probabilities)


class Choice(ABC):
    """What both kinds share: counting tokens, ending, and log-probabilities that wait for their text."""

    def __init__(self, index: int, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.index, self.tokenizer, self.stops = index, tokenizer, Stops(stops)
        self.ids: list[int] = []
        self.finish: str | None = None
        self._arrived = self._shown = 0  # characters of text: read, and let out by `stops`
        self._scored: deque[Scored] = deque()

    @abstractmethod
    def feed(self, delta: Delta) -> list[Json]:
        """The pieces that `delta` brings, the last with a finish_reason if the choice ends here."""

    @staticmethod
    @abstractmethod
    def whole(pieces: Sequence[Json]) -> Json:
        """The choice that all streamed pieces add up to."""

    def _let_out(self, text: str) -> str:
        self._shown += len(text)
        return text

    def _take_scored(self, rest: bool = False) -> list[Scored]:
        """The scored tokens whose text is out; `rest` takes those of no text at the end as well."""
        taken = []
        while self._scored and (self._scored[0][0] < self._shown or rest):
            taken.append(self._scored.popleft())
        return taken

    def name(self, token: int) -> str:
        return self.tokenizer.decode([token])


class ChatChoice(Choice):
    """An assistant message: reasoning, content and tool calls, parsed from the ids.

    Stop strings watch the content alone. Calls are dropped where the request allowed none (`calls` false).
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: Sequence[str], channel: str | None, *, calls: bool, scores: bool
    ) -> None:
        super().__init__(index, tokenizer, stops)
        self.parser = Parser(tokenizer, channel)
        self._calls, self._scores, self._called = calls, scores, False
        self._in_tag = False

    def feed(self, delta: Delta) -> list[Json]:
        pieces: list[Json] = []
        for n, token in enumerate(delta.tokens):
            if self.finish is not None:
                break
            self._read(token, delta.logprobs[n] if self._scores and n < len(delta.logprobs) else None, pieces)
        if self.finish is None and delta.finish is not None:
            self._show(self.parser.finish(delta.finish), pieces)
            if self.finish is None:
                self._end(delta.finish, pieces)
        return pieces

    def _read(self, token: int, score: TokenLogprob | None, pieces: list[Json]) -> None:
        before, start, closed = self.parser.channel, self._arrived, self.parser.ended
        last = token == self.tokenizer.end_of_msg
        if closed and not last:  # the message is closed; what follows is nobody's
            return self._end("stop", pieces)
        self.ids.append(token)
        events = self.parser.feed([token])
        if score is not None and self._is_content(token, before, events):
            self._scored.append((start, score))
        self._show(events, pieces)
        if self.finish is None and last:
            self._end("stop", pieces)
        return None

    def _is_content(self, token: int, channel: str | None, events: list[Event]) -> bool:
        """Whether a token belongs to the content: its tags do not, and half a character does."""
        special = token in (self.tokenizer.open, self.tokenizer.close, self.tokenizer.sep)
        if special:
            self._in_tag = token != self.tokenizer.sep
        inside = channel == "response" or any(isinstance(event, Content) for event in events)
        return inside and not special and not self._in_tag

    def _show(self, events: list[Event], pieces: list[Json]) -> None:
        for event in events:
            match event:
                case Reasoning(text):
                    self._add(pieces, {"reasoning_content": text})
                case Content(text):
                    self._arrived += len(text)
                    self._content(self.stops.push(text), pieces)
                    if self.stops.found is not None:
                        return self._end("stop", pieces)
                case CallStart(index, name) if self._calls:
                    self._content(self.stops.flush(), pieces)
                    self._called = True
                    function = {"name": name, "arguments": ""}
                    call = {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                    self._add(pieces, {"tool_calls": [{**call, "function": function}]})
                case CallArguments(index, text) if self._calls:
                    self._add(pieces, {"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        return None

    def _content(self, text: str, pieces: list[Json]) -> None:
        if text:
            self._add(pieces, {"content": self._let_out(text)})

    def _end(self, reason: str, pieces: list[Json]) -> None:
        self._content(self.stops.flush(), pieces)
        self.finish = "tool_calls" if reason == "stop" and self._called else reason
        self._add(pieces, {}, finish_reason=self.finish, rest=self.stops.found is None)

    def _add(self, pieces: list[Json], delta: Json, finish_reason: str | None = None, rest: bool = False) -> None:
        piece: Json = {"delta": delta, "finish_reason": finish_reason}
        if self._scores:
            scored = [self._score(score) for _, score in self._take_scored(rest)]
            piece["logprobs"] = {"content": scored, "refusal": None} if scored else None
        pieces.append(piece)

    def _score(self, score: TokenLogprob) -> Json:
        top = [self._entry(token, value) for token, value in score.top]
        return {**self._entry(score.token, score.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> Json:
        return {"token": self.name(token), "logprob": logprob, "bytes": list(self.tokenizer.decode_bytes([token]))}

    @staticmethod
    def whole(pieces: Sequence[Json]) -> Json:
        message: Json = {"role": "assistant", "content": None}
        scores: list[Json] = []
        for piece in pieces:
            for key in ("content", "reasoning_content"):
                if key in piece["delta"]:
                    message[key] = (message.get(key) or "") + piece["delta"][key]
            for call in piece["delta"].get("tool_calls", ()):
                _add_call(message.setdefault("tool_calls", []), call)
            scores += (piece.get("logprobs") or {"content": []})["content"]
        scored = {"logprobs": {"content": scores, "refusal": None} if "logprobs" in pieces[-1] else None}
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        return {"message": message, **scored, "finish_reason": pieces[-1]["finish_reason"]}


def _add_call(calls: list[Json], call: Json) -> None:
    if "id" in call:
        calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
    else:
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


class TextChoice(Choice):
    """Plain continuation. `scores` is the number of alternatives asked for, None for no log-probabilities."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: Sequence[str], scores: int | None, echo: Sequence[int] = ()
    ) -> None:
        super().__init__(index, tokenizer, stops)
        self._decoder = StreamDecoder(tokenizer, skip_special=True)
        self._scores, self._echo = scores, echo
        self._offset = 0  # characters of an echoed prompt, which text_offset counts

    def feed(self, delta: Delta) -> list[Json]:
        pieces: list[Json] = []
        if self._echo:
            pieces += self._echoed(delta)
        text = ""
        for n, token in enumerate(delta.tokens):
            if self.stops.found is not None:
                break
            self.ids.append(token)
            if self._scores is not None and n < len(delta.logprobs):
                self._scored.append((self._arrived, delta.logprobs[n]))
            text += self._push(self._decoder.push(token))
        if delta.finish is not None and self.stops.found is None:
            text += self._push(self._decoder.flush()) + self._let_out(self.stops.flush())
        self.finish = "stop" if self.stops.found is not None else delta.finish
        if text or self.finish or self._scored:
            pieces.append(self._piece(text))
        return pieces

    def _push(self, text: str) -> str:
        self._arrived += len(text)
        return self._let_out(self.stops.push(text))

    def _piece(self, text: str) -> Json:
        rest = self.finish is not None and self.stops.found is None
        scored = [(start + self._offset, score) for start, score in self._take_scored(rest)]
        return {"text": text, "logprobs": self._block(scored), "finish_reason": self.finish}

    def _echoed(self, delta: Delta) -> list[Json]:
        """The prompt's own text, with its log-probabilities: the first token has none."""
        decoder, text = StreamDecoder(self.tokenizer), ""
        scored: list[tuple[int, TokenLogprob | int]] = []
        given = delta.prompt_logprobs or (None,) * len(self._echo)
        for token, score in zip(self._echo, given):
            scored.append((len(text), token if score is None else score))
            text += decoder.push(token)
        text += decoder.flush()
        self._offset, self._echo = len(text), ()
        return [{"text": text, "logprobs": self._block(scored), "finish_reason": None}]

    def _block(self, scored: Sequence[tuple[int, TokenLogprob | int]]) -> Json | None:
        if self._scores is None:
            return None
        block: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for start, score in scored:
            known = isinstance(score, TokenLogprob)
            block["tokens"].append(self.name(score.token if known else score))  # type: ignore[union-attr,arg-type]
            block["token_logprobs"].append(score.logprob if known else None)  # type: ignore[union-attr]
            block["top_logprobs"].append({self.name(t): v for t, v in score.top} if known else None)  # type: ignore[union-attr]
            block["text_offset"].append(start)
        return block

    @staticmethod
    def whole(pieces: Sequence[Json]) -> Json:
        blocks = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
        merged = {key: [item for block in blocks for item in block[key]] for key in blocks[0]} if blocks else None
        text = "".join(piece["text"] for piece in pieces)
        return {"text": text, "logprobs": merged, "finish_reason": pieces[-1]["finish_reason"]}
