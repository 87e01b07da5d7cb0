"""Offload Proxy: an OpenAI-compatible reverse proxy that keeps long-running agents inside their context window.

The primitives:

- A **Policy** (`core.policy`) says what one tenant may do and how its history is offloaded: the upstream, the mode, the
  limits. `policies` loads the files, and `policies.tenants` finds the policy of a request.
- A **History** (`core.history`) is a client's conversation: messages with their sizes in tokens, and a chain of digests
  that identifies it. The client sends all of it with every request.
- A **Plan** (`core.plan`) is what to do about a history: which tool results move out of the context and where a summary
  replaces old messages. `core.planner` makes it from history and policy alone, so that every replica makes the same.
- A **Dialect** (`dialects`) knows one API. It reads a request into a history, renders a plan as a body for upstream,
  and has the machine for a turn. Only dialects know an API's field names.
- A **Turn** (`dialects.turn`) is one visible reply: the model's rounds, in which it may call the proxy's own tools
  (`core.retrieval`), and what the client sees of them. It does no I/O: `requests.tool_loop` drives it.
- A **Record** (`requests.records`) is something that a model wrote and that has to be remembered: a summary, or a round
  that the client did not see. Records are written once, under names derived from the history, into a store (`stores`).

The life of a chat request:

 1. `server.protocol` parses HTTP within bounds; `server.app` finds the tenant and picks the handler.
 2. `requests.handler` reads the body, and the dialect splits it. Anything but chat goes to `requests.relay`.
 3. `requests.message_cache` measures the messages that this process has not seen before.
 4. `core.planner` makes the plan. If there is nothing to do, the client's own bytes go upstream.
 5. `requests.records` fetches snapshots and hidden rounds; `requests.summaries` makes a summary that is missing.
 6. `requests.prepare` renders the plan: references instead of moved results, a snapshot instead of old messages.
 7. `requests.tool_loop` sends it through `requests.turn_io` and `upstream.client`, and feeds the reply to the turn.
 8. If the model calls one of the proxy's tools, the turn gets the answer from this very history and asks again.
 9. The client gets the last round as it arrives; its reply ends after the hidden rounds are stored.
10. `telemetry` counts and logs one outcome.

`docs/architecture.md` has the picture, the invariants and the packages' layers.
"""

__version__ = "0.1.0"
