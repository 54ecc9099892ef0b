#!/bin/sh
# Regenerates the Go code of the .proto files beside it. Needs protoc (Debian:
# protobuf-compiler); the two plugins are built at fixed versions for this run.
set -eu
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
GOBIN=$bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
GOBIN=$bin go install connectrpc.com/connect/v2/cmd/protoc-gen-connect-go@v2.0.2
PATH=$bin:$PATH protoc -I . \
	--go_out=. --go_opt=paths=source_relative \
	--connect-go_out=. --connect-go_opt=paths=source_relative,package_suffix \
	agent.proto commands.proto files.proto
