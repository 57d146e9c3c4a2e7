# Verbs of the project. `make demo` and `make test` are all that a newcomer needs.
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: proto
proto: ; scripts/proto.sh
