"""A chat-completions request: read, measured for the plan, rewritten with all other bytes kept, and summarised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import attachments, entries
from proxy.dialects.attachments import KINDS
from proxy.dialects.base import bounded, parsed
from proxy.dialects.entries import (
    Mark,
    Places,
    appended,
    call_section,
    known,
    media_section,
    sources,
    texts_in,
    title,
    with_texts_in,
)
from proxy.dialects.request import ALLOWED, RoundRequest, read_summary, summary_members, summary_task, uncalled
from proxy.plan.message import Count, Message, Reading, ToolCall
from proxy.plan.plan import Role
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Reason, Request, Unplannable
from proxy.policy import SnapshotRole
from proxy.rawjson import NULL, Members, NotJson, elements_of, object_of, text_of

NAME = "chat"
ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
LIMITS = ("max_tokens", "max_completion_tokens")
EXCLUSIVE = ("functions", "function_call", "audio", "web_search_options", "prediction")
"""Fields that our tools do not work with."""

KNOWN = frozenset(
    (
        *EXCLUSIVE,
        # OpenAI: `CompletionCreateParams` of its SDK 3.57
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "n"),
        *("store", "max_tokens", "max_completion_tokens", "temperature", "top_p", "frequency_penalty"),
        *("presence_penalty", "seed", "stop", "logit_bias", "logprobs", "top_logprobs", "response_format"),
        *("modalities", "metadata", "user", "reasoning_effort", "verbosity", "service_tier", "safety_identifier"),
        *("moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("cache_control",),  # Anthropic's, which OpenRouter and LiteLLM take
        # vLLM: entrypoints/openai/chat_completion/protocol.py; the guided ones until 0.11
        *("top_k", "min_p", "repetition_penalty", "length_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
        *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "bad_words"),
        *("allowed_token_ids", "prompt_logprobs", "logprob_token_ids", "structured_outputs", "chat_template_kwargs"),
        *("priority", "request_id", "cache_salt", "vllm_xargs", "mm_processor_kwargs", "media_io_kwargs"),
        *("add_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
        *("include_reasoning", "thinking_token_budget", "use_beam_search", "watermarking", "repetition_detection"),
        *("stream_interval", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        # SGLang: srt/entrypoints/openai/protocol.py
        *("regex", "ebnf", "stop_regex", "no_stop_trim", "lora_path", "custom_logit_processor", "custom_params"),
        *("separate_reasoning", "stream_reasoning", "rid", "extra_key", "return_hidden_states"),
        *("return_routed_experts", "return_cached_tokens_details", "return_meta_info"),
        *("max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "images_config"),
        # llama.cpp: tools/server/README.md
        *("cache_prompt", "id_slot", "n_predict", "typical_p", "top_n_sigma", "grammar", "json_schema", "samplers"),
        *("min_keep", "n_probs", "post_sampling_probs", "repeat_penalty", "repeat_last_n", "dry_multiplier"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_probability"),
        *("xtc_threshold", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta"),
        *("timings_per_token", "return_progress", "reasoning_format", "reasoning_budget", "response_fields"),
        *("sse_ping_interval", "lora"),
        *("keep_alive", "options", "think", "format"),  # Ollama: the names of its own API
        # OpenRouter: `ChatGenerationParams` of @openrouter/sdk
        *("provider", "models", "route", "usage", "reasoning", "session_id", "trace", "top_a", "transforms"),
        # Mistral: `ChatCompletionRequest` of mistralai 3.7
        *("random_seed", "safe_prompt", "prompt_mode", "guardrails", "top_prompt_logprobs"),
        # Groq: groq, types/chat/completion_create_params.py
        *("search_settings", "compound_custom", "citation_options", "include_domains", "exclude_domains"),
        *("disable_tool_validation",),
        *("clear_thinking", "disable_reasoning", "min_completion_tokens"),  # Cerebras: cerebras-cloud-sdk 1.91
        *("context_length_exceeded_behavior", "safety_model", "compliance"),  # Together: together 3.1
        # Z.ai: zai-sdk 0.2; DeepSeek, Moonshot and MiniMax name `thinking` alike
        *("thinking", "do_sample", "tool_stream"),
        # DashScope, MiniMax, Fireworks and xAI: their pages on chat completions, and litellm's transformations
        *("enable_thinking", "thinking_budget", "preserve_thinking", "enable_search", "search_options"),
        *("reasoning_split", "reasoning_history", "search_parameters"),
        *("extra_body", "google"),  # Gemini's page on OpenAI compatibility
        # LiteLLM's proxy: litellm/proxy/litellm_pre_call_utils.py, litellm/types
        *("tags", "fallbacks", "num_retries", "timeout", "drop_params", "allowed_openai_params"),
        *("litellm_session_id", "litellm_trace_id", "litellm_metadata"),
    )
)
"""The top-level members with which a history means what it means without them. A request with others passes
unplanned; the policy's `upstream.members` adds to them."""

SAID = ("role", "content", "name", "cache_control", "__copilotMessageSource")  # Copilot CLI's note of who says it
MESSAGES = {
    **dict.fromkeys(("system", "developer", "user"), SAID),
    "assistant": (
        *(*SAID, "tool_calls", "refusal", "annotations", "reasoning_content", "reasoning", "reasoning_details"),
        *("thinking_blocks", "provider_specific_fields"),  # LiteLLM
    ),
    "tool": (*SAID, "tool_call_id", "tool_name"),
}
"""The members of messages, by role, that may be moved, cut or merged."""
MARKS = ("cache_control", "prompt_cache_breakpoint")
PARTS = {
    "text": ("type", "text", *MARKS),
    "refusal": ("type", "refusal"),
    "thinking": ("type", "thinking", "signature", "closed"),  # Mistral
    **{kind: ("type", kind, *MARKS) for kind in ("image_url", "input_audio", "video_url", "file")},
}
CALLS = {
    "function": ("type", "id", "index", "function", "extra_content", "provider_specific_fields"),
    "custom": ("type", "id", "index", "custom"),
}
"""`extra_content` is Gemini's signature of a thought, which upstream wants only in the steps that it still gets."""


# -- the request -------------------------------------------------------------------------------------------------------


def parse(body: bytes, members: Members) -> Request:
    return parsed(
        body,
        members,
        bounded(members.get("messages", NULL), Reason.TOO_MANY_MESSAGES),
        limits=LIMITS,
        known=KNOWN,
        obstacle=_obstacle(members),
    )


def _obstacle(members: Members) -> str:
    if exclusive := [field for field in EXCLUSIVE if not rawjson.is_null(members.get(field))]:
        return exclusive[0]
    if bytes(members.get("n", b"1")) not in (b"1", b"null"):
        return "n"
    if bytes(members.get("logprobs", b"")) == b"true":
        return "logprobs"
    return "modalities" if b"audio" in bytes(members.get("modalities", b"")) else ""


# -- the request of each round -----------------------------------------------------------------------------------------


class ChatRoundRequest(RoundRequest):
    limits = LIMITS
    listed = ALLOWED

    @staticmethod
    def tool(definition: bytes) -> bytes:
        return rawjson.encode({"type": "function", "function": Raw(definition)})

    @property
    def wants_json(self) -> bool:
        return text_of(object_of(self.members.get("response_format")).get("type")) not in ("", "text")

    @property
    def wants_usage(self) -> bool:
        """Whether the client asks for the usage of its stream."""
        options = object_of(self.members.get("stream_options"))
        return bytes(options.get("include_usage", b"")) == b"true"

    @property
    def asks_usage(self) -> bool:
        return self.usage and self.streams and not self.wants_usage and bool(self._usage_wanted())

    def _assembled(self, entries: Sequence[bytes | Raw]) -> Members:
        return {"messages": Raw(rawjson.array(entries))}

    def _members(self, entries: Sequence[bytes | Raw], ours: Sequence[bytes]) -> Members:
        members = super()._members(entries, ours)
        return members | self._usage_wanted() if self.asks_usage else members

    def _usage_wanted(self) -> Members:
        options = self.members.get("stream_options")
        if not rawjson.is_null(options) and not bytes(options or b"").startswith(b"{"):
            return {}  # upstream will report the mistake
        return {"stream_options": Raw(rawjson.encode(object_of(options) | {"include_usage": Raw(b"true")}))}


# -- one message ------------------------------------------------------------------------------------------------------


def read(raw: bytes | Raw, reading: Reading, count: Count) -> Message:
    try:
        members = rawjson.members(raw)
    except NotJson as error:
        raise Unplannable(str(error)) from error
    role = text_of(members.get("role"))
    try:
        message = _measured(raw, members, role, reading, count)
        return message if is_known(members) else entries.sealed(message)
    except (NotJson, msgspec.MsgspecError):  # it counts as a result of its step
        return entries.unreadable(NAME, raw, ROLES.get(role, Role.TOOL), count)


def _measured(raw: bytes | Raw, members: Members, role: str, reading: Reading, count: Count) -> Message:
    if role not in ROLES:
        raise NotJson(f"unknown role {role[:40]!r}")
    content = members.get("content")
    texts, others, calls = texts_in(content), _others(content), tool_calls(members)
    fixed = sum(map(attachments.tokens, others))
    if ROLES[role] is not Role.ASSISTANT:
        answers = _text(members.get("tool_call_id"))
        media = media_in(content)
        return entries.of_client(
            NAME, ROLES[role], raw, texts, others, reading, count, answers=answers, fixed=fixed, media=media
        )
    tokens = sum(count(text) for _, text in texts) + count(reasoning(members)) + fixed
    tokens += sum(entries.call_tokens(call, count) for call in calls)
    said = "".join(text for _, text in texts)
    return entries.of_model(NAME, raw, said, calls, calls, tokens, fixed, count, others)


def is_known(members: Members) -> bool:
    """Whether we know everything in a message, so that it may be moved or cut. Raises NotJson."""
    content = members.get("content")
    if not (rawjson.is_null(content) or rawjson.is_string(content) or rawjson.is_array(content)):
        return False
    return known(members, MESSAGES, text_of(members.get("role"))) and all(
        known(one, table, text_of(one.get("type")) or unnamed)
        for field, table, unnamed in (("content", PARTS, "text"), ("tool_calls", CALLS, "function"))
        if rawjson.is_array(members.get(field))
        for one in map(rawjson.members, rawjson.elements(members[field]))
    )


def texts(raw: bytes | Raw) -> Places:
    content = rawjson.members(raw).get("content")
    return [*texts_in(content), *((place, part.decode("utf-8", "replace")) for place, part in media_in(content))]


def media_in(content: Raw | None) -> list[tuple[int, bytes]]:
    """Return images, audio and files as canonical JSON, with their places."""
    found = enumerate(map(rawjson.members, elements_of(content)))
    return [(place, entries.unmarked(part)) for place, part in found if text_of(part.get("type")) in KINDS]


def reasoning(members: Members) -> str:
    """Return the model's reasoning, under any vendor's name for it."""
    for field in ("reasoning_content", "reasoning"):
        if rawjson.is_string(members.get(field)):
            return rawjson.text(members[field])
    return ""


def tool_calls(members: Members) -> list[ToolCall]:
    """Return an assistant message's calls of functions and custom tools."""
    if rawjson.is_null(members.get("tool_calls")):
        return []
    return [_call(rawjson.members(raw)) for raw in rawjson.elements(members["tool_calls"])]


def with_texts(raw: bytes | Raw, replaced: Mapping[int | None, str]) -> bytes:
    if not replaced:
        return bytes(raw)
    members = rawjson.members(raw)
    return rawjson.encode(members | {"content": with_texts_in(members.get("content", NULL), replaced)})


def said(raw: bytes | Raw) -> tuple[str, list[ToolCall]]:
    members = rawjson.members(raw)
    return "".join(text for _, text in texts_in(members.get("content"))), tool_calls(members)


def answered(raw: bytes | Raw) -> str:
    return text_of(rawjson.members(raw).get("tool_call_id"))


def marked(raw: bytes | Raw, mark: Mark) -> bytes | Raw:
    members = rawjson.members(raw)
    content = entries.marked_content(members.get("content"), mark)
    return raw if content is None else rawjson.encode(members | {"content": content})


def _call(members: Members) -> ToolCall:
    kind = "custom" if "custom" in members else "function"
    inner = rawjson.members(members[kind]) if kind in members else members
    arguments = inner.get("input" if kind == "custom" else "arguments")
    return ToolCall(_text(members.get("id")), _text(inner.get("name")), _text(arguments))


def _text(raw: Raw | None) -> str:
    """Return a string's text, or the JSON of any other value: some clients send arguments as objects."""
    if raw is None or rawjson.is_null(raw):
        return ""
    return rawjson.text(raw) if rawjson.is_string(raw) else bytes(raw).decode("utf-8", "replace")


def _others(content: Raw | None) -> list[bytes]:
    """Return images, audio and files as canonical JSON, without cache breakpoints."""
    parts = map(rawjson.members, elements_of(content))
    return [entries.unmarked(part) for part in parts if not rawjson.is_string(part.get("text"))]


# -- for upstream -----------------------------------------------------------------------------------------------------


def with_snapshot(messages: list[bytes | Raw], leading: int, block: str, role: SnapshotRole) -> list[bytes | Raw]:
    if role is SnapshotRole.USER or (role is SnapshotRole.AUTO and not leading):
        return [*messages[:leading], _user_message(block, messages[leading:]), *messages[leading:]]
    if leading:
        with suppress(NotJson):
            if is_known(rawjson.members(messages[0])):  # otherwise our text might mean what nobody knows
                return [appended(messages[0], "\n\n" + block), *messages[1:]]
    return [rawjson.encode({"role": "system", "content": block}), *messages]


def _user_message(text: str, before: Sequence[bytes | Raw]) -> bytes:
    """Return a user message with the name of the message that it stands before, so that the two can be joined."""
    first = rawjson.members(before[0]) if before else {}
    named = {"name": first["name"]} if "name" in first and text_of(first.get("role")) == "user" else {}
    return rawjson.encode({"role": "user", **named, "content": text})


def is_system(raw: bytes | Raw) -> bool:
    """Whether the message is a system message, by either name."""
    return text_of(rawjson.members(raw).get("role")) in ("system", "developer")


# -- for readers ------------------------------------------------------------------------------------------------------


def sections(raw: bytes | Raw, index: int, message: Message, tool: str) -> list[Section]:
    members = rawjson.members(raw)
    heading = title(index, message, tool)
    thought = reasoning(members)
    made = [Section(f"{heading} reasoning", thought, message.role)] if thought else []
    made += _contents(members.get("content"), heading, message.role)
    made += sources(heading, members, message.role)
    made += [call_section(heading, call, message.role) for call in tool_calls(members)]
    return made or [Section(heading, "", message.role)]


def _contents(content: Raw | None, heading: str, role: Role) -> list[Section]:
    """Return texts unchanged, what images and files are, and other parts as JSON."""
    if content is None or rawjson.is_null(content):
        return []
    if rawjson.is_string(content):
        return [Section(heading, rawjson.text(content), role)]
    media, made = dict(media_in(content)), list[Section]()
    for place, part in enumerate(rawjson.elements(content)):
        said = rawjson.members(part).get("text")
        text = rawjson.text(said) if rawjson.is_string(said) else bytes(part).decode()
        made.append(media_section(heading, media[place], role) if place in media else Section(heading, text, role))
    return made


# -- user messages in a row, which many chat templates refuse, so that a cut must not create them ----------------------

BLANK_LINE = b"\\n\\n"  # as it is written in a JSON string
TEXT = Raw(b'{"type":"text"}')


def joined(messages: Sequence[bytes | Raw]) -> list[bytes | Raw]:
    found: list[bytes | Raw] = []
    for name, run in groupby(messages, key=_speaker):
        first, *others = run
        found += [first, *others] if name is None or not others else [_one(first, *others)]
    return found


def _speaker(raw: bytes | Raw) -> str | None:
    """Return the name in a user message in which we know everything; None for everything else."""
    members = rawjson.members(raw)
    with suppress(NotJson):
        if text_of(members.get("role")) == "user" and is_known(members):
            return text_of(members.get("name"))
    return None


def _one(*messages: bytes | Raw) -> bytes:
    """Return one message with the members of all; where several have one, that of the last message counts. Strings
    become one, or parts if a message has parts, with blank lines between them."""
    members: Members = {}
    contents: list[Raw] = []
    for user in map(rawjson.members, messages):
        members |= user
        contents += [] if rawjson.is_null(user.get("content")) else [user["content"]]
    if all(map(rawjson.is_string, contents)):
        texts = [bytes(content)[1:-1] for content in contents]
        return rawjson.encode(members | {"content": Raw(b'"%b"' % BLANK_LINE.join(filter(None, texts)))})
    parts: list[Members] = []
    for content in contents:
        is_text = rawjson.is_string(content)
        new = (
            [object_of(TEXT) | {"text": content}] if is_text else list(map(rawjson.members, rawjson.elements(content)))
        )
        if parts and new and rawjson.is_string(text := new[0].get("text")):
            new[0] |= {"text": Raw(b'"' + BLANK_LINE + bytes(text)[1:])}
        parts += new
    return rawjson.encode(members | {"content": Raw(rawjson.array(map(rawjson.encode, parts)))})


# -- summary calls ----------------------------------------------------------------------------------------------------

WHO = ("user", "safety_identifier")
HOW = ("prompt_cache_key", "cache_control", "service_tier", "reasoning_effort")


def summary_request(text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
    return rawjson.encode(_asking(model, request, most) | {"messages": [{"role": "user", "content": text}]})


def summary_on_prefix(
    text: str, request: Request, entries: Sequence[bytes | Raw], tools: Sequence[bytes], most: int, end: int
) -> bytes:
    """If the last entry is a user message, the task goes on with it; see `joined`."""
    members = _asking(request.model, request, most)
    members |= uncalled(request, list(map(ChatRoundRequest.tool, tools)), b'"none"')
    task = summary_task(text, request, end)
    goes_on = bool(entries) and _speaker(entries[-1]) is not None
    messages = [*entries[:-1], _one(entries[-1], task)] if goes_on else [*entries, task]
    return rawjson.encode(members | {"messages": Raw(rawjson.array(messages))})


def _asking(model: str, request: Request | None, most: int) -> Members:
    """Return all members except messages and tools, with the reply's limit in the client's fields, because servers know
    one or the other, or in the older one."""
    members = summary_members(model, request, WHO, (*HOW, *LIMITS))
    limits = [name for name in LIMITS if members.pop(name, None) is not None] or LIMITS[:1]
    return members | (dict.fromkeys(limits, Raw(b"%d" % most)) if most else {})


def summary_answer(status: int, body: bytes) -> SummaryAnswer:
    read = read_summary(status, body, _summary)
    if status == 400 and not read.too_long and LIMITS[1].encode() in body:
        return SummaryAnswer(status, again=_with_newer_limit)
    return read


def _summary(reply: Members) -> tuple[str, bool]:
    choice, *_ = map(rawjson.members, rawjson.elements(reply["choices"]))
    return said(choice["message"])[0], text_of(choice.get("finish_reason")) == "stop"


def _with_newer_limit(body: bytes) -> bytes:
    """Return the body of a call with the reply's limit in the newer field, which some models insist on."""
    members = rawjson.members(body)
    old, new = LIMITS
    return rawjson.encode({new if name == old else name: value for name, value in members.items()})
