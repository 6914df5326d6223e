#!/usr/bin/env bash
# Makes models/tiny, the container that is compiled into the program, from the bf16 checkpoint in models/tiny-bf16.
# A fresh clone has it already; run this after a change of the packers and commit the result.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cargo run --release --quiet -- convert models/tiny-bf16 "$out/tiny" --to int4-g64
cp "$out"/tiny/* models/tiny/
