"""Attacks on a real server's sockets, beside an honest client whose requests must all succeed byte for byte.

    python -m tests.wire_fuzz --seconds 3600 --seed 1 --connections 8
    python -m tests.wire_fuzz --seed 1 --case 4711            # one case alone, to look at a violation

`attacks` makes case NUMBER of a seed: bytes to write to a socket, pauses, half-closes and resets, by a table of kinds.
`replies` makes what upstream says to it, by the same two numbers. `honest` is the client that everybody else is
measured by: plain, streamed and offloaded chats, operations and relayed paths, on connections of its own and on ones
that an attacker has just used through a front such as nginx. `run` drives all of them at a spawned proxy and checks:

- every honest request gets its own reply, byte for byte, and reaches upstream as it has to; nothing of an attacker
  arrives under the honest client's key, and what the proxy sends upstream is well-formed;
- the process lives and answers /health; its log has no traceback; nobody is answered 500 by a bug;
- its memory stays below a bound, its descriptors come back, SIGTERM ends it within the drain timeout.

The bytes of a case depend on its seed and number only, when they meet others does not: a violation names all cases
that were under way.
"""
