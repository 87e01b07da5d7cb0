"""Reads a chat-completions request: decodes the few members that the proxy needs, and keeps the bytes of all."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.base import bounded, parsed
from proxy.dialects.request import ALLOWED, RoundRequest
from proxy.plan.turn import Reason, Request
from proxy.rawjson import NULL, Members, object_of, text_of

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
        # Anthropic's, which OpenRouter and LiteLLM take beside a chat
        *("cache_control",),
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
        # Ollama: the names of its own API, which clients send to this one
        *("keep_alive", "options", "think", "format"),
        # OpenRouter: `ChatGenerationParams` of @openrouter/sdk, and "provider routing"
        *("provider", "models", "route", "usage", "reasoning", "session_id", "trace", "top_a", "transforms"),
        # Mistral: `ChatCompletionRequest` of mistralai 3.7
        *("random_seed", "safe_prompt", "prompt_mode", "guardrails", "top_prompt_logprobs"),
        # Groq: groq, types/chat/completion_create_params.py
        *("search_settings", "compound_custom", "citation_options", "include_domains", "exclude_domains"),
        *("disable_tool_validation",),
        # Cerebras: cerebras-cloud-sdk 1.91
        *("clear_thinking", "disable_reasoning", "min_completion_tokens"),
        # Together: together 3.1
        *("context_length_exceeded_behavior", "safety_model", "compliance"),
        # Z.ai: zai-sdk 0.2; DeepSeek, Moonshot and MiniMax name `thinking` alike
        *("thinking", "do_sample", "tool_stream"),
        # DashScope, MiniMax, Fireworks and xAI: their pages on chat completions, and litellm's transformations
        *("enable_thinking", "thinking_budget", "preserve_thinking", "enable_search", "search_options"),
        *("reasoning_split", "reasoning_history", "search_parameters"),
        # Gemini's page on OpenAI compatibility
        *("extra_body", "google"),
        # LiteLLM's proxy: litellm/proxy/litellm_pre_call_utils.py, litellm/types
        *("tags", "fallbacks", "num_retries", "timeout", "drop_params", "allowed_openai_params"),
        *("litellm_session_id", "litellm_trace_id", "litellm_metadata"),
    )
)
"""The top-level members with which a history means what it means without them. A request with others passes
unplanned; the policy's `upstream.members` adds to them."""

SAID = ("role", "content", "name", "cache_control", "__copilotMessageSource")  # Copilot CLI's note of who says it
MESSAGES = {
    "system": SAID,
    "developer": SAID,
    "user": SAID,
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
    "image_url": ("type", "image_url", *MARKS),
    "input_audio": ("type", "input_audio", *MARKS),
    "video_url": ("type", "video_url", *MARKS),
    "file": ("type", "file", *MARKS),
}
CALLS = {
    "function": ("type", "id", "index", "function", "extra_content", "provider_specific_fields"),
    "custom": ("type", "id", "index", "custom"),
}
"""`extra_content` is Gemini's signature of a thought, which upstream wants only in the steps that it still gets."""


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
    for field in EXCLUSIVE:
        if not rawjson.is_null(members.get(field)):
            return field
    if bytes(members.get("n", b"1")) not in (b"1", b"null"):
        return "n"
    if bytes(members.get("logprobs", b"")) == b"true":
        return "logprobs"
    return "modalities" if b"audio" in bytes(members.get("modalities", b"")) else ""


# -- tools ------------------------------------------------------------------------------------------------------------


def function_tool(definition: bytes) -> bytes:
    """Return one of our tools in the form that this API expects."""
    return rawjson.encode({"type": "function", "function": Raw(definition)})


# -- the request of each round -----------------------------------------------------------------------------------------


class ChatRoundRequest(RoundRequest):
    """The requests of a turn of the chat API."""

    limits = LIMITS
    listed = ALLOWED
    tool = staticmethod(function_tool)

    @property
    def wants_json(self) -> bool:
        kind = text_of(object_of(self.members.get("response_format")).get("type"))
        return kind not in ("", "text")

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
