"""Offload Proxy: a reverse proxy for OpenAI's and Anthropic's APIs that keeps long-running agents
inside their context.

The primitives:

- A **Policy** (`policy`) says what one tenant may do and how its history is offloaded. `policies`
  loads the files, and `policies.tenants` finds the policy of a request.
- A **History** (`plan.history`) is a client's conversation: messages with their sizes in tokens,
  and a chain of digests that identifies it. The client sends all of it with every request.
- A **Plan** (`plan.plan`) is what to do about a history: which tool results move out of the
  context, and where a summary replaces old messages. `plan.planner` makes it from history, policy,
  window and recorded pauses alone.
- A **Dialect** (`dialects`) knows one API. It reads a request into a history, renders a plan as a
  body for upstream, and has the machine for a turn. Only dialects know an API's field names.
- A **Turn** (`dialects.turn`) is one visible reply: the model's rounds, in which it may call the
  proxy's own tools (`tools`), and what the client sees of them. It does no I/O:
  `requests.conversation` drives it.
- A **Record** (`requests.records`) is what has to be remembered: a summary, the rounds that the
  client did not see, an original, a pause after which upstream's cache had expired. Records are
  written once, under names derived from the history, into a store (`stores`).

`docs/architecture.md` tells the life of a request, with a picture, the invariants and the packages'
layers.
"""

__version__ = "1.0.0"
