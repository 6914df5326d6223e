#!/usr/bin/env bash
# Perplexity of the small model by domain, weight format and activation mode, as the table of docs/quality.md.
# usage: tools/quality.sh [GLM]     GLM: the program, default target/release/glm
set -euo pipefail
glm=$(realpath "${1:-target/release/glm}")
cd "$(dirname "$0")/.."
src=models/tiny-bf16
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
domains="stories chat code_json multilingual recall prose"

ppl() { # MODEL ACTIVATIONS DOMAIN -> "nats tokens"
  "$glm" score "$src/valid/$3.txt" --model "$1" --activations "$2" --window 512 --no-prefix --parse-special --json --quiet |
    sed -n 's/.*"tokens":\([0-9]*\),.*"nats_per_token":\([0-9.]*\),.*/\2 \1/p'
}

printf '| weights | activations |'; for d in $domains; do printf ' %s |' "$d"; done; printf ' all | against bf16 |\n'
printf '|---|---|'; for d in $domains; do printf '%s' '---|'; done; printf '%s\n' '---|---|'
base=
for format in bf16 int8 int4-g64 int4-row; do
  model=$src
  if [ "$format" != bf16 ]; then
    model=$tmp/$format
    "$glm" convert "$src" "$model" --to "$format" --quiet
  fi
  for activations in f32 q8; do
    # Activation modes differ only for integer formats.
    [ "$format $activations" = "bf16 q8" ] && continue
    printf '| %s | %s |' "$format" "$activations"
    for d in $domains; do
      read -r nats tokens < <(ppl "$model" "$activations" "$d")
      echo "$nats $tokens" >> "$tmp/$format-$activations"
      awk -v n="$nats" 'BEGIN { printf " %.3f |", exp(n) }'
    done
    all=$(awk '{ s += $1 * $2; n += $2 } END { printf "%.6f", exp(s / n) }' "$tmp/$format-$activations")
    base=${base:-$all}
    awk -v a="$all" -v b="$base" 'BEGIN { printf " %.4f | %+.2f%% |\n", a, 100 * (a / b - 1) }'
  done
done
