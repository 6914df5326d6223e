#!/usr/bin/env bash
# Perplexity of the small model by domain, as the tables of docs/quality.md: over weight formats and activation modes,
# and over modes of lossy routing.
# usage: tools/quality.sh [GLM [TABLE]]     GLM: the program, default target/release/glm; TABLE: formats or lossy
set -euo pipefail
glm=$(realpath "${1:-target/release/glm}")
cd "$(dirname "$0")/.."
src=models/tiny-bf16
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
table=${2:-both}

ppl() { # MODEL ACTIVATIONS DOMAIN -> "nats tokens"
  "$glm" score "$src/valid/$3.txt" --model "$1" --activations "$2" --window 512 --no-prefix --parse-special --json --quiet |
    sed -n 's/.*"tokens":\([0-9]*\),.*"nats_per_token":\([0-9.]*\),.*/\2 \1/p'
}

formats() {
  local domains="stories chat code_json multilingual recall prose" base=
  printf '| weights | activations |'; for d in $domains; do printf ' %s |' "$d"; done; printf ' all | against bf16 |\n'
  printf '|---|---|'; for d in $domains; do printf '%s' '---|'; done; printf '%s\n' '---|---|'
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
}

# Experts are read through half as many slots as there are experts, one token a pass, as in decoding.
lossy() {
  local domains="chat code_json prose" base=
  "$glm" convert "$src" "$tmp/lossy" --to int4-g64 --quiet
  printf '| routing | slots |'; for d in $domains; do printf ' %s |' "$d"; done
  printf ' all | against exact | choices kept | dropped | KL | read per token |\n'
  printf '|---|---|'; for d in $domains; do printf '%s' '---|'; done; printf '%s\n' '---|---|---|---|---|---|'
  while read -r slots mode; do
    printf '| %s | %s |' "${mode:-exact}" "$slots"
    local sums=$tmp/lossy-sums
    : > "$sums"
    for d in $domains; do
      # shellcheck disable=SC2086
      "$glm" score "$src/valid/$d.txt" --model "$tmp/lossy" --window 512 --no-prefix --parse-special --json --quiet \
        --slots "$slots" --pass-rows 1 --io buffered ${mode:+--lossy-$mode} > "$tmp/score"
      field() { sed -n "s/.*\"$1\":\([0-9.]*\).*/\1/p" "$tmp/score" | grep . || echo "$2"; }
      echo "$(field nats_per_token) $(field tokens) $(field processed_tokens) $(field misses)" \
        "$(field agreement 1) $(field dropped 0) $(field kl 0)" >> "$sums"
      awk -v n="$(field nats_per_token)" 'BEGIN { printf " %.3f |", exp(n) }'
    done
    base=$(awk -v base="$base" '
      { nats += $1 * $2; n += $2; rows += $3; read += $4; kept += $5 * $3; dropped += $6 * $3; kl += $7 * $3 }
      END {
        all = exp(nats / n)
        if (base == "") base = all
        printf " %.4f | %+.2f%% | %.1f%% | %.1f%% | %.4f | %.2f |\n", all, 100 * (all / base - 1), 100 * kept / rows,
          100 * dropped / rows, kl / rows, read / rows > "/dev/stderr"
        printf "%.12f", base
      }' "$sums" 2>&3)
  done <<'END'
40
40 expert-top-p 0.9
40 expert-top-p 0.8
40 expert-top-p 0.6
40 expert-top-p 0.4
40 expert-top-k 3
40 expert-top-k 2
40 expert-top-k 1
40 cache-route 3,8
40 cache-route 2,8
40 cache-route 1,8
40 cache-route 2,16
40 miss-budget 2
40 miss-budget 1
40 miss-budget 0
20
20 cache-route 2,8
20 miss-budget 1
END
} 3>&1

case $table in
  formats) formats ;;
  lossy) lossy ;;
  both) formats; echo; lossy ;;
  *) echo "TABLE is $table, expected formats or lossy" >&2; exit 2 ;;
esac
