"""The dashboard at `/_offload/`: what was sent and what it cost, from rows in a file beside the log."""
