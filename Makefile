# hutch: `make up` and `make test` do everything, also on a new machine.
.DEFAULT_GOAL := help
SHELL := /bin/bash

GO       ?= go
VERSION  ?= 0.1.0-dev
LDFLAGS  := -s -w -X main.version=$(VERSION)
export CGO_ENABLED = 0
# Sessions, sandboxes and namespaces are kernel objects; a few tests at a time.
TESTFLAGS ?= -timeout 20m

.PHONY: help deps up build test check lint generate bench soak clean docs

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deps: ## install what the machine lacks (apt, as root)
	@scripts/deps.sh

build: bin/hutch bin/hutch-guest bin/hutch-runsc ## make the three programs in bin/

.PHONY: bin/hutch bin/hutch-guest bin/hutch-runsc

bin/hutch:
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $@ ./cmd/hutch

bin/hutch-guest:
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $@ ./cmd/hutch-guest

bin/hutch-runsc:
	$(GO) run ./tools/gvisorpatch
	cd cmd/hutch-runsc && $(GO) build -trimpath -ldflags '-s -w' -o ../../bin/hutch-runsc .

up: deps build ## start hutch on this machine and show one sandbox's life
	ln -sfn $(CURDIR)/bin/hutch /usr/local/bin/hutch
	hutch up --tour

check: ## format, vet and the rules of the tree
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -d $$(git ls-files '*.go'); exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags soak ./cmd/hutch ./internal/histories
	$(GO) run ./tools/gvisorpatch
	cd cmd/hutch-runsc && $(GO) vet .

lint: ## golangci-lint, built from source at first (some minutes)
	$(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.5.0 run

test: deps build check ## all tests, on real sandboxes (root)
	$(GO) test $(TESTFLAGS) ./...

bench: deps build ## measure the first path beside the bare runtime, and the control plane
	$(GO) run ./tools/bench
	$(GO) run ./tools/controlbench

soak: deps build ## what takes longer than `make test` may; writes docs/soak.md
	$(GO) test -tags soak -count 1 -timeout 4h -run '^TestSoak' -p 1 $(SOAKFLAGS) ./cmd/hutch ./internal/histories

generate: ## write generated code and documents anew
	$(GO) generate ./...

clean: ## remove what was built
	rm -rf bin build
