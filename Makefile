# Everything is installed into a virtual environment in this folder.
PYTHON ?= python3
VENV ?= .venv
# To use another build of PyTorch, for example with a GPU: make TORCH=torch==2.13.0 demo
BIN := $(VENV)/bin
# pip draws a bar for each download on a terminal, and prints one line per package elsewhere.
PIP_OPTIONS := --disable-pip-version-check
LOCKED_INSTALL = $(BIN)/pip install $(PIP_OPTIONS) --no-deps --require-hashes --only-binary :all:
DEMO_EXTRAS := train,demo
TEST_EXTRAS := aws,$(DEMO_EXTRAS),heic,hub,report,where,notebook,docs,dev

.PHONY: demo test test-integration test-newest test-slow mutations test-torch-2.5 test-torch-2.3 optional \
	lint screens docs site plans images requirements sbom audit statements bench gpu findings clean

demo: $(VENV)/.demo
	$(BIN)/python -m sm_train.toolkit.demo

# What a change breaks most often, in less than ten minutes of CPU with its collection. Each worker
# process imports the product and the stand-in of AWS for itself, so there are as many as cores.
test: $(VENV)/.installed
	$(RUN_TESTS) -n 2 --junitxml=build/test.xml -m "not integration and not slow"

# The second tier: containers, network namespaces, browsers, installations, and what runs several
# processes for long.
test-integration: $(VENV)/.installed $(VENV)/.container-toolkit optional
	$(RUN_TESTS) -n 4 --junitxml=build/test-integration.xml -m "integration and not slow"

# The first tier with the newest versions that setup.cfg allows: finds a release that breaks
# new installations before a newcomer does.
test-newest: $(VENV)-newest/.installed
	$(subst $(BIN),$(VENV)-newest/bin,$(RUN_TESTS)) -m "not integration and not slow"

# A limit for the whole run, after which the stacks of all processes are printed. A worker that a
# test's own limit ends is not started again, so that several limits do not add up.
# Compiled modules are kept: each worker and each program that a test starts imports them.
RUN_TESTS = PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/build/pycache \
	$(BIN)/python tests/tiers/time_limit.py 2400 $(BIN)/python -m pytest --dist worksteal \
	--max-worker-restart 0

test-slow: $(VENV)/.installed optional
	$(BIN)/pytest -m slow -o faulthandler_timeout=0

# Puts the faults of tests/mutations/mutations.json into a copy, and names those that no test notices.
mutations: $(VENV)/.installed optional
	$(BIN)/python -m tests.mutations.run

# Packages of single features, outside of the environment's own: diffusers would import them in every
# process.
optional: $(VENV)/.installed
	$(BIN)/pip install --quiet --upgrade --no-deps --target $(VENV)/optional \
		-r estimators/data/requirements-optional.txt

# Tests the trainer with the PyTorch of the newest and of the oldest image with SMDDP, in a separate
# environment (6 GB).
test-torch-2.5: TORCH_VERSION = 2.5.1
test-torch-2.3: TORCH_VERSION = 2.3.1
test-torch-2.5 test-torch-2.3: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)-$(@:test-%=%)
	$(VENV)-$(@:test-%=%)/bin/pip install --quiet "torch==$(TORCH_VERSION)"
	$(VENV)-$(@:test-%=%)/bin/pip install --quiet --require-hashes \
		-r estimators/data/requirements-$(@:test-%=%).txt
	TRAIN_PYTHON=$(CURDIR)/$(VENV)-$(@:test-%=%)/bin/python $(BIN)/pytest \
		tests/cluster/test_training.py tests/cluster/test_families.py tests/cluster/test_doctor.py \
		tests/cluster/test_smddp.py tests/entrypoints/script

# mypy does not follow the package_dir map of an editable install, so it reads a folder of links.
# Its second run finds calls that macOS does not have. vulture reads the product alone, so that it
# also reports code that only tests use.
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/types/sm_train
	for folder in toolkit estimators cost entrypoints; do \
		ln -sfn $(CURDIR)/$$folder build/types/sm_train/$$folder; done
	ln -sfn $(CURDIR)/entrypoints/api/__init__.py build/types/sm_train/__init__.py
	MYPYPATH=build/types $(BIN)/mypy
	MYPYPATH=build/types $(BIN)/mypy --platform darwin
	MYPYPATH=build/types $(BIN)/mypy benchmarks
	$(BIN)/vulture

# The text of every screen at 80 and 120 columns, which tests compare: look at the difference.
screens: $(VENV)/.installed
	UPDATE_SCREENS=1 $(BIN)/pytest -q tests/toolkit/screens

# Draws the pictures of the documentation.
docs: $(VENV)/.installed
	$(BIN)/python docs/images/plan.py
	$(BIN)/python docs/images/diagrams.py
	$(BIN)/python docs/images/views.py
	$(BIN)/python -m docs.wings

# Builds the documentation in build/site. References are generated; nothing is fetched.
site: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Read it with: $(BIN)/python -m http.server --directory build/site"

# Counts the FLOPs and memory of the model presets with PyTorch; tests compare the files with the
# presets.
plans: $(VENV)/.installed
	$(BIN)/python benchmarks/shipped_plans.py

# Copies the SageMaker SDK's table of AWS's images, for installations without the SDK.
images: $(VENV)/.installed
	$(BIN)/python benchmarks/image_table.py > build/images.json
	mv build/images.json estimators/data/images.json

# Runs what is known of other software's behavior (findings/README.md); prints what has changed.
findings:
	@failed=0; for script in findings/*.sh; do \
		echo "$$script"; bash "$$script" || { echo "$$script: changed"; failed=1; }; done; exit $$failed

# Pins the packages of jobs and Lambda functions with everything that they need, and with hashes.
# Versions change only where an .in file demands it; make UPGRADE=--upgrade requirements takes the
# newest.
requirements: $(VENV)-audit/.installed
	cd estimators/data && for file in requirements.in requirements-*.in; do \
		$(abspath $(VENV))-audit/bin/uv pip compile --quiet $(UPGRADE) --universal \
			--python-version 3.11 --generate-hashes \
			--custom-compile-command "make requirements" \
			$$([ $$file = requirements-optional.in ] && echo --no-deps) \
			$$([ $$file = requirements-local.in ] || echo --override image-packages.txt) \
			$$file -o $${file%.in}.txt || exit 1; done
	$(COMPILE) -c estimators/data/requirements.txt tests/environments/torch.in -o tests/environments/torch.txt
	$(COMPILE) tests/container/mpi/requirements.in --no-deps -o tests/container/mpi/requirements.txt
	$(call compile_environment,$(DEMO_EXTRAS),demo)
	$(call compile_environment,$(TEST_EXTRAS),test)

COMPILE = $(VENV)-audit/bin/uv pip compile --quiet $(UPGRADE) --universal --python-version 3.11 \
	--generate-hashes --custom-compile-command "make requirements"
# $(1): extras; $(2): the file's name. What only PyTorch's build needs is in torch.txt.
compile_environment = $(COMPILE) -c estimators/data/requirements.txt -c tests/environments/torch.txt \
	$(foreach extra,$(subst $(comma), ,$(1)),--extra $(extra)) setup.cfg tests/environments/build.in \
	$$(sed -nE 's/^((nvidia|cuda)-[a-z0-9-]+|torch|triton)==.*/--no-emit-package \1/p' tests/environments/torch.txt) \
	-o tests/environments/$(2).txt
comma := ,

# Counts the statements of the product by wing, without docstrings.
statements: $(VENV)/.installed
	$(BIN)/python -m benchmarks.statements

# Writes what a laptop, a job and each Lambda function install as CycloneDX documents.
sbom: $(VENV)/.installed $(VENV)-audit/.installed
	mkdir -p build/sbom
	$(VENV)-audit/bin/cyclonedx-py environment --output-file build/sbom/laptop.json $(BIN)/python
	for file in estimators/data/*.in; do name=$$(basename $${file%.in}); \
		$(VENV)-audit/bin/cyclonedx-py requirements --output-file build/sbom/$$name.json \
			$${file%.in}.txt || exit 1; done

# Compares the pinned packages with the advisory database, by default that of PyPI. Fails also if it
# does not know a package.
audit: $(VENV)-audit/.installed
	for file in estimators/data/*.in; do echo $${file%.in}.txt; \
		$(VENV)-audit/bin/pip-audit --strict --disable-pip --require-hashes $(AUDIT_OPTIONS) \
			-r $${file%.in}.txt || exit 1; done

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/cli_start.py
	$(BIN)/python benchmarks/cost.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/loader_order.py
	$(BIN)/python benchmarks/pack.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/ema.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/entry.py
	$(BIN)/python benchmarks/flops.py
	$(BIN)/python benchmarks/diagnose.py
	$(BIN)/python benchmarks/diagnose_accuracy.py
	$(BIN)/python benchmarks/doctor.py
	$(BIN)/python benchmarks/doctor_accuracy.py
	$(BIN)/python benchmarks/monitor.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/review.py
	$(BIN)/python benchmarks/cloudwatch_metrics.py

# Proves on one GPU what no CPU exercises, in at most eight minutes: make TORCH=torch==2.13.0 gpu
gpu: $(VENV)/.installed optional
	$(BIN)/python benchmarks/gpu.py --optional $(VENV)/optional

# Creates an environment with exact versions, each checked against its hash: of PyTorch the CPU
# build, if a package index has it, otherwise PyPI's build with the libraries that it needs.
$(VENV)/.torch: Makefile tests/environments/torch-cpu.txt tests/environments/torch.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11, 4) and 'Python 3.11.4 or newer is required: make PYTHON=python3.11')"
	@echo "1/2 Installing PyTorch in $(VENV): 200 MB for the CPU build, 3 GB for PyPI's on Linux"
	$(PYTHON) -m venv $(VENV)
ifdef TORCH
	$(BIN)/pip install $(PIP_OPTIONS) $(TORCH)
else
	$(LOCKED_INSTALL) -r tests/environments/torch-cpu.txt 2>/dev/null || \
		$(LOCKED_INSTALL) -r tests/environments/torch.txt
endif
	touch $@

# What the demo needs: no test tools.
$(VENV)/.demo: $(VENV)/.torch setup.cfg pyproject.toml tests/environments/demo.txt
	@echo "2/2 Installing sm-train and the packages of the demo"
	$(LOCKED_INSTALL) -r tests/environments/demo.txt
	$(BIN)/pip install $(PIP_OPTIONS) --no-deps --no-build-isolation -e .
	touch $@

# The packages of jobs in the versions of jobs, and the tools of the tests.
$(VENV)/.installed: $(VENV)/.torch setup.cfg pyproject.toml tests/environments/test.txt
	@echo "2/2 Installing sm-train and the tools of its tests: about 260 packages, 2 to 5 minutes"
	$(LOCKED_INSTALL) -r tests/environments/test.txt
	$(BIN)/pip install $(PIP_OPTIONS) --no-deps --no-build-isolation -e .
	touch $@ $(VENV)/.demo

# The newest versions that setup.cfg allows, without the pins. pip would try versions for an hour.
$(VENV)-newest/.installed: setup.cfg pyproject.toml $(VENV)-audit/.installed
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/pip install $(PIP_OPTIONS) --quiet $(or $(TORCH),torch==2.13.0)
	$(VENV)-audit/bin/uv pip install --quiet --python $(VENV)-newest/bin/python \
		-e ".[$(TEST_EXTRAS)]"
	touch $@

# uv compiles requirements, cyclonedx-bom writes SBOMs, pip-audit reads advisory databases.
$(VENV)-audit/.installed: Makefile
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/pip install --quiet "uv>=0.9,<1" "cyclonedx-bom>=7,<8" "pip-audit>=2.9,<3"
	touch $@

# The toolkit with which AWS's PyTorch images start a training script. It needs a C compiler; its
# test is skipped if the installation fails.
$(VENV)/.container-toolkit: $(VENV)/.installed tests/container/mpi/requirements.txt
	-$(BIN)/pip install --quiet --no-deps --no-build-isolation --require-hashes \
		-r tests/container/mpi/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-audit $(VENV)-newest $(VENV)-torch-2.* build demo-out
