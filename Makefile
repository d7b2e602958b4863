# Targets for people and for CI. `make run`, `make test` and `make quick` are those of the README.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DATA   ?= .data
WORKERS ?= auto
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Tests start hundreds of processes, and each would compile everything that it imports, asserts of tests included.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run package test demo check lint types imports figures structure quick unit ci-tests thorough proto smoke acceptance-manager acceptance-index acceptance-capacity acceptance-transfer acceptance-service acceptance-connectors acceptance-residency acceptance-gpu acceptance-quality acceptance-optimizer acceptance-valkey acceptance-deploy gameday acceptance-gameday engines engine-packages clean

setup: $(VENV)/.dev

# The server alone: small and quick, for `make run`.
$(VENV)/.server: pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint .ci/constraints.txt --editable '.[server]'
	touch $@

# Everything that tests, demo and benchmarks need. torch goes first and pinned: other packages asking for
# it would bring a build for GPUs. triton interprets the kernels of GPUs in tests.
$(VENV)/.dev: $(VENV)/.server
	$(PIP) install --quiet --constraint .ci/constraints.txt torch==2.13.0
	$(PIP) install --quiet --constraint .ci/constraints.txt --editable '.[server,gateway,scorer,engine,mooncake,tracing,optimizer,subscriber,dev]'
	$(PIP) install --quiet --constraint .ci/constraints.txt --no-deps triton
	touch $@

# Engines for the tests on real ones. Each has an environment of its own, since no two of them agree on their packages;
# those are listed completely, so nothing is resolved. Ours is added without what it asks for, as an engine has that.
engines: $(VENV)-vllm/.made $(VENV)-sglang/.made

# All but ours, so they can be installed while `make setup` describes this tree's package in it.
engine-packages: $(VENV)-vllm/.packages $(VENV)-sglang/.packages

$(VENV)-%/.packages: .ci/engines/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

$(VENV)-%/.made: $(VENV)-%/.packages
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# Tests and benchmarks start real Redis servers of their own.
.PHONY: redis
redis:
	command -v redis-server > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server; } \
	  || { echo "redis-server >= 7 is needed on the PATH for tests and benchmarks" >&2; exit 1; }

# Storage tests mount a file system that fails on command. Without root or /dev/fuse they are skipped, and say so.
.PHONY: fuse
fuse:
	ldconfig -p | grep -q libfuse3 || { apt-get update -qq && apt-get install -y -qq --no-install-recommends '^libfuse3-[34]$$'; } \
	  || echo "libfuse3 is missing: tests on failing storages are skipped" >&2

# The client of the Mooncake store is linked with it, whatever the network. Without it the tests on a real store are
# skipped, and say so.
.PHONY: mooncake
mooncake:
	ldconfig -p | grep -q libibverbs.so.1 || { apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1; } \
	  || echo "libibverbs1 is missing: tests on a Mooncake store are skipped" >&2

# Prometheus' checker of rules. Only that is taken from the package, which would also start a server. Without it the
# checks of deploy/prometheus are skipped, and say so.
.PHONY: promtool
promtool:
	command -v promtool > /dev/null && command -v prometheus > /dev/null || { apt-get update -qq && mkdir -p build/prometheus && cd build/prometheus \
	    && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb . \
	    && install usr/bin/promtool usr/bin/prometheus /usr/local/bin; } \
	  || echo "promtool is missing: checks of alert rules are skipped" >&2

# Builds the Dockerfile where there is no Docker, on a base of Debian's packages. Without it these tests are skipped, and
# say so.
.PHONY: buildah
buildah:
	command -v buildah > /dev/null && command -v mmdebstrap > /dev/null \
	  || { apt-get update -qq && apt-get install -y -qq --no-install-recommends buildah mmdebstrap; } \
	  || echo "buildah or mmdebstrap is missing: the images are not built and not run" >&2

# Helm, for the tests of its chart: a package has it as a library, for a newer Python than it needs. Without it these tests
# are skipped, and say so.
.PHONY: helm
helm: setup
	test -d build/helm/helm_sdkpy || $(PIP) install --quiet --target build/helm --no-deps --only-binary :all: \
	    --ignore-requires-python --python-version 3.12 --require-hashes --requirement .ci/helm.txt \
	  || echo "Helm is missing: tests of the chart are skipped" >&2

# Hosts of the game day are network name spaces; nft loses packets where the kernel has no netem. Without them it is left
# out, and says so.
.PHONY: iproute
iproute:
	{ command -v ip && command -v tc && command -v nft; } > /dev/null \
	  || { apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2 nftables; } \
	  || echo "iproute2 is missing: the game day is left out" >&2

# Reports are opened in a real browser. Without one these tests are skipped, and say so.
.PHONY: chromium
chromium:
	command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
	  || echo "chromium is missing: tests of reports in a browser are skipped" >&2

# The proxy that the console's document shows. Only the program is taken from the package, which would also start a server.
# Without it these tests are skipped, and say so.
.PHONY: nginx
nginx:
	command -v nginx > /dev/null || { apt-get update -qq && mkdir -p build/nginx && cd build/nginx \
	    && apt-get download -qq nginx && dpkg-deb -x nginx_*.deb . && install usr/sbin/nginx /usr/local/bin && nginx -v; } \
	  || echo "nginx is missing: tests of the console behind a proxy are skipped" >&2

run: $(VENV)/.server
	$(BIN)/kvcm serve --data-dir $(DATA)

# Wheel, sdist and SBOM of the checked-out commit, below dist/: docs/releases.md.
package: $(VENV)-package/.made
	.ci/package $(<D)/bin/python

$(VENV)-package/.made: pyproject.toml .ci/constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt build cyclonedx-bom
	touch $@

test: check unit

# The type checker has one core, the others share another.
check: setup
	$(MAKE) --jobs 2 --output-sync=target types lint imports figures

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python benchmarks/structure.py --check

# Files, lines, modules with one importer, long functions, words outside the field's.
structure: setup
	$(BIN)/python benchmarks/structure.py --places

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

# Documents show the committed figures.
figures: setup
	$(BIN)/python benchmarks/readme.py --check

# The core in at most 90 seconds on two cores: no processes, a fifth of the examples of property tests, and of the sparse
# tier no whole engines and no interpreted kernels.
QUICK_TESTS := tests/model tests/index tests/cache tests/reclaim tests/registry tests/property tests/connectors tests/gpu_tier
SLOW_TESTS := engine*.py kernels_*.py sharing.py coordinator.py coordinator_content.py pqcache.py wave_buffer.py block_cache.py \
  lru_diff.py coordinator_order.py
quick: setup
	KVCM_TESTS=quick $(BIN)/python -m pytest -q --no-header --show-capture=no -r fE --numprocesses $(WORKERS) --maxprocesses 4 \
	    --dist worksteal $(QUICK_TESTS) $(SLOW_TESTS:%=--ignore-glob 'tests/gpu_tier/test_%')

# Three workers on two cores: tests wait for processes and deadlines a quarter of their time.
unit: setup redis fuse mooncake promtool
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile

# What `make test` leaves to .ci/run: documents, dashboards, images, packages, browsers, faults, long histories, and real
# processes that are killed. One run of pytest, so that servers are started once; three workers, as above. Files that take
# longest go first, so that no core waits at the end.
CI_TOOLS := redis fuse mooncake chromium nginx helm promtool buildah iproute
LONGEST := $(wildcard tests/deploy/test_images.py tests/e2e/test_*.py tests/docs/test_doc_quickstart.py tests/gpu_tier/test_shards.py \
  tests/connectors/test_reuse_architectures.py tests/connectors/test_tier_processes.py \
  tests/connectors/test_reuse_transformers.py tests/gpu_tier/test_kernels_compile.py \
  tests/gpu_tier/test_gpu_benchmarks.py tests/service/test_index_commands.py tests/service/test_cli_tour.py \
  tests/web/test_console_pages.py tests/restore/test_restore_drill.py tests/package/test_fresh_install.py \
  tests/upgrade/test_upgrade_stores.py tests/docs/test_doc_browser.py)
ci-tests: setup $(CI_TOOLS)
	$(BIN)/python -m pytest -m '(ci or e2e) and not engines' --durations 15 \
	    --numprocesses 3 --dist loadfile --no-loadscope-reorder $(LONGEST) tests

# The same, and the tests marked `ci`, with every history that the property tests know: five times as many.
thorough: setup redis fuse mooncake
	KVCM_TESTS=thorough $(BIN)/python -m pytest -m 'not e2e and not engines' --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --timeout 600

demo: setup
	$(BIN)/python docs/examples/demo/run.py $(DEMO_ARGS)

# Pages that are made of the code: calls, resources, commands.
.PHONY: reference
reference: setup
	$(BIN)/python docs/site/reference.py

# The documents as a site in build/site. Nothing is fetched, neither while it is built nor while it is read. Pages open
# from that folder; the search wants a server: python3 -m http.server --directory build/site
.PHONY: docs
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file docs/site/mkdocs.yml

proto: setup
	$(BIN)/python proto/generate.py
	$(BIN)/python docs/site/reference.py

# Full figures, committed under benchmarks/results/, and the documents that show them.
acceptance-manager: setup
	$(BIN)/python benchmarks/match.py --json benchmarks/results/match.json
	$(BIN)/python benchmarks/reuse.py --json benchmarks/results/reuse.json
	$(BIN)/python benchmarks/readme.py

# The demo, real engines, and the benchmarks but those that repeat tests with more kills and faults (of crashes the
# benchmark). Figures of so short a run mean little, so missed targets are shown and do not count; violations do. Most
# therefore run beside each other, three on two cores, since they wait half of their time; those that load a manager fully
# and judge what it answers do not.
smoke: setup redis fuse mooncake iproute engines
	mkdir -p build
	$(BIN)/python benchmarks/gameday.py --quick --minutes 1 --seed 2 --json build/gameday.json
	$(BIN)/python benchmarks/overload.py --quick --json build/overload.json
	$(BIN)/python benchmarks/soak.py --quick --seconds 15 --store rocksdb redis --json build/soak.json
	$(BIN)/python benchmarks/reclaim.py --quick --json build/reclaim.json
	$(MAKE) --jobs 3 --output-sync=target smoke-beside

# The longest first.
QUICK := connector crash managers group_move service capacity auth_cost live_tuning scale index optimizer layout match transfer \
  mooncake_store mempool slots vitals weights_cost hostile_keys idle residency
.PHONY: smoke-beside smoke-engines smoke-demo smoke-quick-conversation $(QUICK:%=smoke-quick-%)
smoke-beside: smoke-engines smoke-quick-conversation smoke-demo $(QUICK:%=smoke-quick-%) smoke-gpu
smoke-engines:
	$(BIN)/python -m pytest -m engines_smoke tests/engines
smoke-demo:
	$(BIN)/python docs/examples/demo/run.py --json build/demo.json
	$(BIN)/python benchmarks/reuse.py --from build/demo.json --json build/reuse.json
smoke-quick-crash: COUNTS = --kills 3
smoke-quick-group_move: COUNTS = --kills 1
smoke-quick-conversation $(QUICK:%=smoke-quick-%): smoke-quick-%:
	$(BIN)/python benchmarks/$*.py --quick $(COUNTS) --json build/$*.json

# Of the GPU tier those that need no GPU. `tests/gpu_tier/test_gpu_benchmarks.py` runs the others on a CPU, and
# `test_kernels_compile.py` compiles every kernel.
GPU_QUICK := retrieval_quality quality ablations
.PHONY: smoke-gpu $(GPU_QUICK:%=smoke-gpu-quick-%)
smoke-gpu: $(GPU_QUICK:%=smoke-gpu-quick-%)
smoke-gpu: export OMP_NUM_THREADS = 1
$(GPU_QUICK:%=smoke-gpu-quick-%): smoke-gpu-quick-%:
	$(BIN)/python benchmarks/gpu/$*.py --quick --json build/gpu_$*.json

# Durable metadata: its cost, 2·10⁷ blocks in one Redis, 200 kills per store, 200 histories of damage, contended managers,
# faults of Redis.
# An hour on two cores.
acceptance-index: setup redis
	$(BIN)/python benchmarks/index.py --json benchmarks/results/index.json
	$(BIN)/python benchmarks/scale.py --json benchmarks/results/scale.json
	$(BIN)/python benchmarks/crash.py --json benchmarks/results/crash.json
	$(BIN)/python benchmarks/damage.py --json benchmarks/results/damage.json
	$(BIN)/python benchmarks/contention.py --json benchmarks/results/contention.json
	$(BIN)/python benchmarks/idle.py --json benchmarks/results/idle.json
	$(BIN)/python benchmarks/faults.py --json benchmarks/results/faults.json
	$(BIN)/python benchmarks/readme.py

# Eviction: what goes and how much, kills and failing storages, and what readers notice. Half an hour on two cores.
acceptance-capacity: setup redis
	$(BIN)/python benchmarks/capacity.py --json benchmarks/results/capacity.json
	$(BIN)/python benchmarks/reclaim_faults.py --json benchmarks/results/reclaim_faults.json
	$(BIN)/python benchmarks/reclaim.py --json benchmarks/results/reclaim.json
	$(BIN)/python benchmarks/readme.py

# The transfer engine against plain system calls, from the page cache, and against memory; 10⁶ operations on packed
# files; storages that go away while engines work; 200 killed writers per kind of storage. An hour on two idle cores.
acceptance-transfer: setup fuse mooncake
	$(BIN)/python benchmarks/transfer.py --json benchmarks/results/transfer.json
	$(BIN)/python benchmarks/mempool.py --json benchmarks/results/mempool.json
	$(BIN)/python benchmarks/layout.py --json benchmarks/results/layout.json
	$(BIN)/python benchmarks/mooncake_store.py --json benchmarks/results/mooncake_store.json
	$(BIN)/python benchmarks/slots.py --json benchmarks/results/slots.json
	$(BIN)/python benchmarks/storage_outage.py --json benchmarks/results/storage_outage.json
	$(BIN)/python benchmarks/hosts.py --json benchmarks/results/hosts.json
	$(BIN)/python benchmarks/killed_writers.py --json benchmarks/results/killed_writers.json

# Calls to the service against a bare gRPC server, and what keys per request and resident blocks cost, on every store; a
# quarter of an hour of everything at once; managers stopped under load; ten times what a manager can do; a fleet of
# engines on several managers; a group that moves between stores under load.
# Two hours on two idle cores, 3 GB of memory.
acceptance-service: setup redis
	$(BIN)/python benchmarks/service.py --json benchmarks/results/service.json
	$(BIN)/python benchmarks/service.py --scaling --json benchmarks/results/service_scaling.json
	$(BIN)/python benchmarks/auth_cost.py --json benchmarks/results/auth_cost.json
	$(BIN)/python benchmarks/vitals.py --json benchmarks/results/vitals.json
	$(BIN)/python benchmarks/soak.py --json benchmarks/results/soak.json
	$(BIN)/python benchmarks/restarts.py --json benchmarks/results/restarts.json
	$(BIN)/python benchmarks/overload.py --json benchmarks/results/overload.json
	$(BIN)/python benchmarks/hostile_keys.py --json benchmarks/results/hostile_keys.json
	$(BIN)/python benchmarks/fleet.py --json benchmarks/results/fleet.json
	$(BIN)/python benchmarks/group_move.py --json benchmarks/results/group_move.json
	$(BIN)/python benchmarks/managers.py --json benchmarks/results/managers.json

# Connectors in real engines.
acceptance-connectors: setup redis fuse engines
	rm -rf build/features
	$(BIN)/python -m pytest -m 'engines or feature' --numprocesses $(WORKERS) --maxprocesses 2 --dist loadfile tests/engines tests/connectors
	$(BIN)/python benchmarks/compatibility.py --json benchmarks/results/compatibility.json
	$(BIN)/python benchmarks/connector.py --json benchmarks/results/connector.json
	$(BIN)/python benchmarks/weights_cost.py --json benchmarks/results/weights_cost.json
	$(BIN)/python benchmarks/conversation.py --json benchmarks/results/conversation.json
	$(BIN)/python benchmarks/conversation_plot.py
	$(BIN)/python benchmarks/readme.py

# What lies in engines' own memory: the index, events of storages under failovers, routing of real engines.
acceptance-residency: setup redis engines
	KVCM_TESTS=thorough $(BIN)/python -m pytest -m 'not engines' tests/residency tests/service/test_storage_events.py tests/connectors/events
	$(BIN)/python benchmarks/residency.py --json benchmarks/results/residency.json
	$(BIN)/python benchmarks/routing.py --json benchmarks/results/routing.json
	$(BIN)/python benchmarks/routing_plot.py
	$(BIN)/python benchmarks/readme.py

# The optimizer against another simulator, on the published traces (KVCM_TRACES says where they are); predictions for
# a running manager, and proposals to it, against its later figures. Seven minutes on two idle cores.
acceptance-optimizer: setup
	$(BIN)/python benchmarks/optimizer.py --json benchmarks/results/optimizer.json
	$(BIN)/python benchmarks/live_tuning.py --json benchmarks/results/live_tuning.json
	$(BIN)/python benchmarks/optimizer_plot.py
	$(BIN)/python benchmarks/readme.py

# The tests that have a Redis, with a Valkey in its place, killed processes included. Its programs must be on the PATH: Debian
# has them since release 13, and in the backports of 12.
acceptance-valkey: setup
	valkey-server --version
	KVCM_REDIS_PROGRAM=valkey $(BIN)/python -m pytest -m 'e2e or not e2e' --numprocesses $(WORKERS) --maxprocesses 2 --dist loadfile \
	  tests/store tests/index tests/cache tests/registry tests/reclaim tests/service tests/e2e tests/restore tests/upgrade \
	  tests/deploy/test_pods.py

# From one release to the next under load, back, and forward again; restores with imports that are killed; packages. Six
# minutes on two idle cores.
acceptance-deploy: setup redis helm package buildah promtool
	KVCM_TESTS=thorough $(BIN)/python -m pytest -m e2e tests/upgrade tests/restore tests/package tests/deploy
	test ! -e build/images.json || cp build/images.json benchmarks/results/images.json

# Everything goes wrong in a cluster on this host, in an order that follows from a seed (docs/gameday). Needs root.
MINUTES ?= 2
SEED ?= 1
gameday: setup redis fuse iproute
	$(BIN)/python benchmarks/gameday.py --minutes $(MINUTES) --seed $(SEED) --report build/gameday --json build/gameday_$(SEED).json

# Three orders, twenty minutes each. An hour and a quarter on four cores.
acceptance-gameday: setup redis fuse iproute
	for seed in 1 2 3; do \
	  $(BIN)/python benchmarks/gameday.py --minutes 20 --seed $$seed --report docs/gameday --json benchmarks/results/gameday_$$seed.json \
	  || exit 1; \
	done

# Quality of the sparse tier's selections, without a GPU: half an hour on one core.
acceptance-quality: setup
	$(BIN)/python benchmarks/gpu/quality.py --json benchmarks/results/gpu_quality.json --report docs/gpu_tier_quality
	$(BIN)/python benchmarks/gpu/index_build.py --full-ablation --json benchmarks/results/gpu_index_build.json
	$(BIN)/python benchmarks/gpu/ablations.py --json benchmarks/results/gpu_ablations.json --report docs/gpu_tier_quality/ablations
	$(BIN)/python benchmarks/gpu/retrieval_quality.py --json benchmarks/results/gpu_retrieval_quality.json --report docs/gpu_tier_quality/retrieval

# The sparse tier on a GPU (docs/gpu_tier_benchmarks.md): an hour and a half on one H100 or H200. Nothing is installed: GPU_PYTHON
# has torch and triton already.
GPU_PYTHON ?= python3
acceptance-gpu:
	@failed=0; for name in check:check_device k1:k1_io_transfer k2:k2_lru_diff k3:k3_decode_attention k4:k4_wave_decode k5:k5_million k6:k6_dsa_decode k7:k7_pq_search k8:k8_index_build k9:k9_end_to_end k10:k10_breakdown; do \
	  $(GPU_PYTHON) benchmarks/gpu/$${name#*:}.py --json benchmarks/results/gpu_$${name%:*}.json || failed=1; \
	done; exit $$failed  # a target that one of them misses does not hide the others

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-sglang $(VENV)-package $(DATA) build dist *.egg-info
