#!/usr/bin/env bash
# Instructions per call of the hot kernels, counted by valgrind: the same for the same binary on every machine, so a
# regression shows without noise. Counts the AVX2 kernels, because valgrind knows no AVX-512.
#
# usage: tools/callgrind.sh        prints a table for docs/benchmarks.md
# needs: valgrind, python3
set -euo pipefail
cd "$(dirname "$0")/.."
command -v valgrind >/dev/null || { echo "valgrind is missing: apt-get install valgrind" >&2; exit 2; }

target=${CARGO_TARGET_DIR:-target/callgrind}
CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_STRIP=none \
  cargo build --release --quiet --target-dir "$target"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Instructions of one function, callees included, per call of another, from a callgrind file.
per_call() {
  python3 - "$1" "$2" "$3" <<'PY'
import re, sys
names, calls, cost, pending, callee = {}, 0, 0, False, ""
for line in open(sys.argv[1]):
    m = re.match(r"c?fn=\((\d+)\)(?: (.*))?", line)
    if m:
        if m[2]:
            names[m[1]] = m[2]
        if line.startswith("cfn"):
            callee = names[m[1]]
    elif line.startswith("calls="):
        calls += int(line[6:].split()[0]) if sys.argv[3] in callee else 0
        pending = sys.argv[2] in callee
    elif pending:
        cost += int(line.split()[1])
        pending = False
print(cost // calls if calls else "–")
PY
}

echo "| kernel, AVX2, one thread | instructions | per multiply-add |"
echo "|---|---|---|"
measure() { # label, function, per call of, multiply-adds of that call, arguments of bench kernels
  local label=$1 function=$2 whole=$3 work=$4
  shift 4
  valgrind --tool=callgrind --callgrind-out-file="$out/cg" "$target/release/glm" bench kernels --isa avx2 --threads 1 \
    --reps 1 --cold 0 --json "$@" >/dev/null 2>&1
  local n
  n=$(per_call "$out/cg" "$function" "$whole")
  echo "| $label | $n | $(python3 -c "print(f'{$n / $work:.4f}')") |"
}
product=avx2::plain::matmul_panels
for batch in 1 4 64; do
  for format in int4-g64 int8; do
    measure "$format 2048×6144, $batch rows" $product Compute::matmul $((2048 * 6144 * batch)) \
      --format $format --shape 2048x6144 --batch $batch --keys 0
  done
done
measure "attention, 16 heads, 1024 keys" avx2::plain::attend avx2::plain::attend $((16 * 1024 * 1088)) --format int8 --shape 16x64 --batch 1 --keys 1024
