"""Attacks a real server's sockets while an honest client's requests must all succeed, byte for
byte.

    python -m tests.wire_fuzz --seconds 3600 --seed 1 --connections 8
    python -m tests.wire_fuzz --seed 1 --case 4711            # one case alone, to look at a violation

`attacks` makes case NUMBER of a seed from a table of kinds: bytes to write to a socket, pauses,
half-closes and resets. `replies` makes upstream's reply to it from the same two numbers. `honest`
is the client that must be served: it sends plain, streamed and offloaded chats, operations and
relayed paths, on its own connections and on ones that an attacker has just used through a front
such as nginx. `run` runs all of them against a spawned proxy and checks that:

- every honest request gets its own reply, byte for byte, and reaches upstream as it must; no
  attacker's request arrives under the honest client's key, and all that the proxy sends upstream is
  well-formed;
- the process lives and answers /health; its log has no traceback; no bug causes a reply of 500;
- its memory stays below a bound, it closes its descriptors, and SIGTERM ends it within the drain
  timeout.

The bytes of a case depend only on its seed and number, but its timing relative to other cases
varies. So a violation names all cases that were running.
"""
