"""Chat completions, `POST .../chat/completions`: a request and its messages, read and rewritten
with all other bytes kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import entries
from proxy.dialects.attachments import KINDS
from proxy.dialects.base import Dialect
from proxy.dialects.chat.reply import LIMITS, ChatRoundRequest, ChatTurn
from proxy.dialects.entries import Contents, Entry, Harmless, unknown, unknown_in
from proxy.dialects.request import bounded
from proxy.plan.plan import Role, ToolCall
from proxy.plan.summary import SummaryAnswer
from proxy.plan.turn import Reason
from proxy.policy import SnapshotRole
from proxy.rawjson import NULL, Members, NotJson, elements_of, object_of, text_of

ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
BARRED = {
    **dict.fromkeys(
        ("functions", "function_call", "audio", "web_search_options", "prediction"), b"null"
    ),
    "n": b"1",
    "logprobs": b"false",
}
"""See `Dialect.barred`."""

KNOWN = frozenset(
    (
        *BARRED,
        # OpenAI: `CompletionCreateParams` of its SDK 3.57
        *(
            "model",
            "messages",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "stream",
            "stream_options",
        ),
        *(
            "store",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "frequency_penalty",
        ),
        *("presence_penalty", "seed", "stop", "logit_bias", "top_logprobs", "response_format"),
        *(
            "modalities",
            "metadata",
            "user",
            "reasoning_effort",
            "verbosity",
            "service_tier",
            "safety_identifier",
        ),
        *("moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("cache_control",),  # Anthropic's, which OpenRouter and LiteLLM take
        # vLLM: entrypoints/openai/chat_completion/protocol.py; the guided ones until 0.11
        *(
            "top_k",
            "min_p",
            "repetition_penalty",
            "length_penalty",
            "min_tokens",
            "ignore_eos",
            "stop_token_ids",
        ),
        *(
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "bad_words",
        ),
        *(
            "allowed_token_ids",
            "prompt_logprobs",
            "logprob_token_ids",
            "structured_outputs",
            "chat_template_kwargs",
        ),
        *(
            "priority",
            "request_id",
            "cache_salt",
            "vllm_xargs",
            "mm_processor_kwargs",
            "media_io_kwargs",
        ),
        *("add_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
        *(
            "include_reasoning",
            "thinking_token_budget",
            "use_beam_search",
            "watermarking",
            "repetition_detection",
        ),
        *("stream_interval", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        # SGLang: srt/entrypoints/openai/protocol.py
        *(
            "regex",
            "ebnf",
            "stop_regex",
            "no_stop_trim",
            "lora_path",
            "custom_logit_processor",
            "custom_params",
        ),
        *("separate_reasoning", "stream_reasoning", "rid", "extra_key", "return_hidden_states"),
        *("return_routed_experts", "return_cached_tokens_details", "return_meta_info"),
        *("max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "images_config"),
        # llama.cpp: tools/server/README.md
        *(
            "cache_prompt",
            "id_slot",
            "n_predict",
            "typical_p",
            "top_n_sigma",
            "grammar",
            "json_schema",
            "samplers",
        ),
        *(
            "min_keep",
            "n_probs",
            "post_sampling_probs",
            "repeat_penalty",
            "repeat_last_n",
            "dry_multiplier",
        ),
        *(
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "xtc_probability",
        ),
        *(
            "xtc_threshold",
            "dynatemp_range",
            "dynatemp_exponent",
            "mirostat",
            "mirostat_tau",
            "mirostat_eta",
        ),
        *(
            "timings_per_token",
            "return_progress",
            "reasoning_format",
            "reasoning_budget",
            "response_fields",
        ),
        *("sse_ping_interval", "lora"),
        *("keep_alive", "options", "think", "format"),  # Ollama: the names of its own API
        # OpenRouter: `ChatGenerationParams` of @openrouter/sdk
        *(
            "provider",
            "models",
            "route",
            "usage",
            "reasoning",
            "session_id",
            "trace",
            "top_a",
            "transforms",
        ),
        # Mistral: `ChatCompletionRequest` of mistralai 3.7
        *("random_seed", "safe_prompt", "prompt_mode", "guardrails", "top_prompt_logprobs"),
        # Groq: groq, types/chat/completion_create_params.py
        *(
            "search_settings",
            "compound_custom",
            "citation_options",
            "include_domains",
            "exclude_domains",
        ),
        *("disable_tool_validation",),
        # Cerebras: cerebras-cloud-sdk 1.91
        *("clear_thinking", "disable_reasoning", "min_completion_tokens"),
        # Together: together 3.1
        *("context_length_exceeded_behavior", "safety_model", "compliance"),
        # Z.ai: zai-sdk 0.2; DeepSeek, Moonshot and MiniMax name `thinking` alike
        *("thinking", "do_sample", "tool_stream"),
        # DashScope, MiniMax, Fireworks and xAI: their pages on chat completions, and litellm's
        # transformations
        *(
            "enable_thinking",
            "thinking_budget",
            "preserve_thinking",
            "enable_search",
            "search_options",
        ),
        *("reasoning_split", "reasoning_history", "search_parameters"),
        *("extra_body", "google"),  # Gemini's page on OpenAI compatibility
        # LiteLLM's proxy: litellm/proxy/litellm_pre_call_utils.py, litellm/types
        *("tags", "fallbacks", "num_retries", "timeout", "drop_params", "allowed_openai_params"),
        *("litellm_session_id", "litellm_trace_id", "litellm_metadata"),
    )
)

SAID = ("role", "content", "name", "__copilotMessageSource")  # Copilot CLI's note of who says it
MESSAGES = {
    **dict.fromkeys(("system", "developer", "user"), SAID),
    "assistant": (
        *(
            *SAID,
            "tool_calls",
            "refusal",
            "annotations",
            "reasoning_content",
            "reasoning",
            "reasoning_details",
        ),
        *("thinking_blocks", "provider_specific_fields"),  # LiteLLM
    ),
    "tool": (*SAID, "tool_call_id", "tool_name"),
}
"""The members of messages, by role, that may be moved, cut or merged."""
PARTS = {
    **{
        kind: (kind,)
        for kind in ("text", "refusal", "image_url", "input_audio", "video_url", "file")
    },
    "thinking": ("thinking", "signature", "closed"),  # Mistral
}
CALLS = {
    "function": ("id", "index", "function", "extra_content", "provider_specific_fields"),
    "custom": ("id", "index", "custom"),
}
"""`extra_content` is Gemini's signature of a thought, which upstream wants only in the steps that
it still gets."""
CALLED = {
    "": ("name", "arguments", "input", "index", "provider_specific_fields", "parsed_arguments")
}
"""The members of what is called, with Ollama's, LiteLLM's and openai-python's."""


class ChatDialect(Dialect):
    name = "chat"
    path = re.compile(rb".*/chat/completions")
    further_paths = re.compile(rb"/chat/completions(?:/|\Z)")
    turns = ChatTurn
    requests = ChatRoundRequest
    known = KNOWN
    barred = BARRED
    caller_members = ("user", "safety_identifier")
    cache_members = (
        "prompt_cache_key",
        "cache_control",
        "service_tier",
        "reasoning_effort",
        *LIMITS,
    )
    carriers = ("text", "input_text")

    # -- a request --

    @staticmethod
    def split(members: Members) -> tuple[list[Raw], str, dict[str, Any]]:
        spoken = "modalities" if b"audio" in bytes(members.get("modalities", b"")) else ""
        return bounded(members.get("messages", NULL), Reason.TOO_MANY_MESSAGES), spoken, {}

    # -- one message --

    @staticmethod
    def opened(message: Entry) -> tuple[Role, Members]:
        """A message of a role that we do not know counts as a result of its step."""
        members = rawjson.members(message)
        return ROLES.get(text_of(members.get("role")), Role.TOOL), members

    @staticmethod
    def contents(role: Role, members: Members) -> Contents:
        if role is Role.TOOL and text_of(members.get("role")) != "tool":
            raise NotJson("unknown role")
        found = Contents(role)
        found.thought(reasoning(members))
        content = members.get("content")
        if rawjson.is_string(content):
            found.text(None, rawjson.text(content))
        elif not rawjson.is_null(content):
            for place, raw in enumerate(rawjson.elements(content or NULL)):
                part = rawjson.members(raw)
                text = part.get("text")
                seen = entries.unmarked(part)
                if rawjson.is_string(text):
                    found.text(place, rawjson.text(text))
                    continue
                found.others.append(seen)
                if text_of(part.get("type")) in KINDS:
                    found.medium(place, seen, moves=False)
                else:
                    found.files.append(seen)
                    found.other(raw)
        if refusal := text_of(members.get("refusal")):
            found.text(None, refusal, said=False, moves=False)
        found.sources(members)
        for call in tool_calls(members):
            found.call(call)
        found.name = text_of(members.get("name")) if role is not Role.TOOL else ""
        if role is not Role.ASSISTANT:
            found.answers = _text(members.get("tool_call_id"))
        return found

    @staticmethod
    def unknown(found: Contents, members: Members, harmless: Harmless) -> str:
        role = text_of(members.get("role"))
        content = members.get("content")
        calls = elements_of(members.get("tool_calls"))
        called = (
            (_called(rawjson.members(call)), "messages[].tool_calls[].function") for call in calls
        )
        return (
            unknown(members, MESSAGES, role, "messages[]", harmless)
            or unknown_in(elements_of(content), PARTS, "messages[].content[]", harmless, "text")
            or unknown_in(calls, CALLS, "messages[].tool_calls[]", harmless, "function")
            or next(
                filter(None, (unknown(one, CALLED, "", at, harmless) for one, at in called)), ""
            )
        )

    @staticmethod
    def content(message: Entry, result: bool) -> tuple[Raw | None, Callable[[Raw], bytes]]:
        members = rawjson.members(message)
        return members.get("content"), lambda content: rawjson.encode(
            members | {"content": content}
        )

    # -- several messages --

    def with_snapshot(
        self, entries: list[Entry], leading: int, block: str, role: SnapshotRole
    ) -> list[Entry]:
        """A user message gets the name in the one that it stands before, so that the two can be
        joined."""
        if role is SnapshotRole.SYSTEM or (role is SnapshotRole.AUTO and leading):
            return super().with_snapshot(entries, leading, block, role)
        first = rawjson.members(entries[leading]) if leading < len(entries) else {}
        named = (
            {"name": first["name"]}
            if "name" in first and text_of(first.get("role")) == "user"
            else {}
        )
        return self.inserted(
            entries, leading, rawjson.encode({"role": "user", **named, "content": block})
        )

    def joined(self, entries: list[Entry]) -> list[Entry]:
        """Many chat templates refuse user messages in a row, so a cut must not create them."""
        found: list[Entry] = []
        for name, run in groupby(entries, key=self._speaker):
            first, *others = run
            found += [first, *others] if name is None or not others else [merged(first, *others)]
        return found

    def _speaker(self, entry: Entry) -> str | None:
        """Return the name in a user message in which we know everything; None for everything
        else."""
        return (
            text_of(rawjson.members(entry).get("name")) if self.known_as(Role.USER, entry) else None
        )

    def followed(self, entries: list[Entry], task: Entry) -> list[Entry]:
        """The task goes on with the last message if that is the user's, whatever the name in it."""
        if entries and self._speaker(entries[-1]) is not None:
            return [*entries[:-1], merged(entries[-1], task)]
        return [*entries, task]

    # -- a hidden round --

    @staticmethod
    def calling(calls: Sequence[ToolCall]) -> Entry:
        called = [{"name": call.name, "arguments": call.arguments} for call in calls]
        made = [
            {"id": call.id, "type": "function", "function": one}
            for call, one in zip(calls, called, strict=True)
        ]
        return rawjson.encode({"role": "assistant", "content": None, "tool_calls": made})

    @staticmethod
    def answer(id: str, text: str, part: str) -> Entry:
        return rawjson.encode({"role": "tool", "tool_call_id": id, "content": text})

    # -- a summary --

    @staticmethod
    def with_limit(members: Members, most: int) -> Members:
        """The limit is in the client's fields, because servers know one or the other, or in the
        older one."""
        limits = [name for name in LIMITS if members.pop(name, None) is not None] or LIMITS[:1]
        return members | (dict.fromkeys(limits, Raw(b"%d" % most)) if most else {})

    @staticmethod
    def answer_in(reply: Members) -> tuple[str, bool]:
        choice, *_ = map(rawjson.members, rawjson.elements(reply["choices"]))
        found = ChatDialect.contents(Role.ASSISTANT, rawjson.members(choice["message"]))
        return "".join(found.spoken), text_of(choice.get("finish_reason")) == "stop"

    def summary_answer(self, status: int, body: bytes) -> SummaryAnswer:
        read = super().summary_answer(status, body)
        if status == 400 and not read.too_long and LIMITS[1].encode() in body:
            return SummaryAnswer(status, again=_with_newer_limit)
        return read


def _with_newer_limit(body: bytes) -> bytes:
    """Return the body of a call with the reply's limit in the newer field, which some models insist
    on."""
    old, new = LIMITS
    return rawjson.encode(
        {new if name == old else name: value for name, value in rawjson.members(body).items()}
    )


LISTS = ("reasoning_details", "thinking_blocks")
"""OpenRouter's and LiteLLM's lists of reasoning."""


def reasoning(members: Members) -> str:
    """Return the model's reasoning, under any vendor's name for it. Where lists have it too, they
    say the same."""
    for field in ("reasoning_content", "reasoning"):
        if found := text_of(members.get(field)):
            return found
    parts = [object_of(part) for field in LISTS for part in elements_of(members.get(field))]
    return "\n".join(
        filter(
            None,
            (text_of(part.get(key)) for part in parts for key in ("text", "summary", "thinking")),
        )
    )


def tool_calls(members: Members) -> list[ToolCall]:
    """Return an assistant message's calls of functions and custom tools."""
    if rawjson.is_null(members.get("tool_calls")):
        return []
    calls: list[ToolCall] = []
    for call in map(rawjson.members, rawjson.elements(members["tool_calls"])):
        inner = _called(call)
        field = "input" if "custom" in call else "arguments"
        calls.append(
            ToolCall(_text(call.get("id")), _text(inner.get("name")), _text(inner.get(field)))
        )
    return calls


def _called(call: Members) -> Members:
    """Return what is called, with which arguments. Some clients write that into the call itself."""
    kind = "custom" if "custom" in call else "function"
    return rawjson.members(call[kind]) if kind in call else call


def _text(raw: Raw | None) -> str:
    """Return a string's text, or the JSON of any other value: some clients send arguments as
    objects."""
    if raw is None or rawjson.is_null(raw):
        return ""
    return rawjson.text(raw) if rawjson.is_string(raw) else bytes(raw).decode("utf-8", "replace")


def is_system(message: Entry) -> bool:
    """Whether the message is a system message, by either name."""
    return text_of(rawjson.members(message).get("role")) in ("system", "developer")


BLANK_LINE = b"\\n\\n"  # as it is written in a JSON string


def merged(*messages: Entry) -> bytes:
    """Return one message with the members of all; where several have one, that of the last message
    counts. Strings become one, or parts if a message has parts, with blank lines between them."""
    members: Members = {}
    contents: list[Raw] = []
    for user in map(rawjson.members, messages):
        members |= user
        contents += [] if rawjson.is_null(user.get("content")) else [user["content"]]
    if all(map(rawjson.is_string, contents)):
        texts = [bytes(content)[1:-1] for content in contents]
        return rawjson.encode(
            members | {"content": Raw(b'"%b"' % BLANK_LINE.join(filter(None, texts)))}
        )
    parts: list[Members] = []
    for content in contents:
        if rawjson.is_string(content):
            new: list[Members] = [{"type": Raw(b'"text"'), "text": content}]
        else:
            new = list(map(rawjson.members, rawjson.elements(content)))
        if parts and new and rawjson.is_string(text := new[0].get("text")):
            new[0] |= {"text": Raw(b'"' + BLANK_LINE + bytes(text)[1:])}
        parts += new
    return rawjson.encode(members | {"content": Raw(rawjson.array(map(rawjson.encode, parts)))})


CHAT = ChatDialect()
