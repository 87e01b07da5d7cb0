"""llama.cpp's own server over a model's file, on a free port that it prints; until its input ends.

It runs in an environment of its own, which has nothing but the server: `python serve.py MODEL NAME
THREADS`.
"""

import sys
from pathlib import Path

import xllamacpp

WINDOW = 32_768
"""What the largest history takes, with all answers of a turn."""

model, name, threads = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.model_alias = {name}
params.chat_template = (Path(__file__).parent / "template.jinja").read_text(encoding="utf-8")
params.use_jinja = True
params.hostnames = ["127.0.0.1"]
params.port = 0
params.n_ctx = WINDOW
params.n_parallel = 1
# a request whose client has gone is given up between two batches
params.n_batch = params.n_ubatch = 256
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
params.sampling.temp = 0
params.warmup = False
params.verbosity = 0

server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
