"""The chat format, both ways: messages -> segments -> ids, and a streaming parser over the ids the model writes.

prompt = render(read_request(body))          # vet_request(body) also refuses what the hosted API refuses
ids = prompt.ids(tokenizer)
parser = Parser(tokenizer, prompt.channel)
events = parser.feed(new_ids); ...; events += parser.finish()
"""

from perilune.chat.parser import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Finish,
    Parser,
    Reasoning,
    Reply,
    ToolCall,
    parse,
)
from perilune.chat.render import Prompt, image_parts, pending_ids, render
from perilune.chat.request import EFFORTS, ChatRequest, declared_tools, read_request, vet_request
from perilune.chat.segments import (
    ChatError,
    Segment,
    encode,
    encode_with_targets,
    image_prompt,
)

__all__ = [
    "EFFORTS",
    "CallArguments",
    "CallStart",
    "ChatError",
    "ChatRequest",
    "Content",
    "Event",
    "Finish",
    "Parser",
    "Prompt",
    "Reasoning",
    "Reply",
    "Segment",
    "ToolCall",
    "declared_tools",
    "encode",
    "encode_with_targets",
    "image_parts",
    "image_prompt",
    "parse",
    "pending_ids",
    "read_request",
    "render",
    "vet_request",
]
