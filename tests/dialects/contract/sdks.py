"""What the newest SDKs make of a stream, through their public interface."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.sdks import anthropic, httpx2, openai

Json = dict[str, Any]
ASKED: Any = [{"role": "user", "content": "hi"}]


class _Stream:
    """An upstream that answers every request with these bytes."""

    body = b""

    def __call__(self, request: Any) -> Any:
        return httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, content=self.body
        )


_stream = _Stream()


@cache
def _transport() -> Any:
    return httpx2.Client(transport=httpx2.MockTransport(_stream))


@cache
def _openai() -> Any:
    return openai.OpenAI(api_key="x", base_url="http://upstream/v1", http_client=_transport())


@cache
def _anthropic() -> Any:
    return anthropic.Anthropic(api_key="x", base_url="http://upstream", http_client=_transport())


def chat(out: bytes) -> Json:
    """What the SDK makes of a stream. It raises if a reply was cut off, so a stream says otherwise
    here."""
    _stream.body = out.replace(b'"length"', b'"stop"')
    with _openai().chat.completions.stream(model="m", messages=ASKED) as stream:
        return stream.get_final_completion().to_dict()


def responses(out: bytes) -> Json:
    _stream.body = out
    with _openai().responses.stream(model="m", input=ASKED) as stream:
        *_, last = stream
    return last.response.to_dict()  # type: ignore[union-attr]


def messages(out: bytes) -> Json:
    _stream.body = out
    with _anthropic().beta.messages.stream(model="m", max_tokens=9, messages=ASKED) as stream:
        return stream.get_final_message().to_dict()
