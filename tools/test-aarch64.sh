#!/usr/bin/env bash
# Builds the tests for 64-bit Arm Linux and runs under QEMU's user-mode emulator those that compute: kernels, pool,
# digests (the same bits as on x86-64), reference outputs, and equality over instruction sets, threads and batches.
# They run as two CPUs, `max` with every optional instruction and `cortex-a72` with neither dot products nor int8
# matrices, so that both sides of every choice at run time are taken. On an Arm machine they run natively.
#
# usage: tools/test-aarch64.sh [--install] [--quick] [CPU…]
#   --install    install the missing packages first (Debian, needs root)
#   --quick      leave out equality over threads and batches, which takes most of the time
#   CPU          CPUs to run as, default `max cortex-a72`; `qemu-aarch64 -cpu help` lists them
# environment:
#   RUSTC        the compiler, default `rustc` if it has the target's standard library (rustup target add
#                aarch64-unknown-linux-gnu), else Debian's /usr/bin/rustc
#
# Exit code: 0 when all passed, 2 for wrong usage or a missing package, else that a build or a test failed.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
unit=(kernels:: pool::)
# Tests that start the program as a process of its own do not belong here: only it would need the emulator again.
integration=(digests oracle equality)
skip=(--skip quantizing_while_loading_equals_converting)

install=
cpus=()
for arg in "$@"; do
  case $arg in
    --install) install=1 ;;
    --quick) integration=(digests oracle) ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    -*) echo "unknown option $arg; see --help" >&2; exit 2 ;;
    *) cpus+=("$arg") ;;
  esac
done
[ ${#cpus[@]} -gt 0 ] || cpus=(max cortex-a72)

if [ "$(uname -m)" = aarch64 ]; then
  echo "== this machine is an Arm: running natively"
  cargo test --release --lib -- "${unit[@]}"
  cargo test --release --test it -- "${integration[@]/%/::}" "${skip[@]}"
  exit 0
fi

# A compiler that has the target's standard library.
has_std() { [ -d "$("$1" --print target-libdir --target $target 2>/dev/null)" ]; }
pick_rustc() {
  rustc=${RUSTC:-rustc}
  [ -n "${RUSTC:-}" ] || has_std "$rustc" || rustc=/usr/bin/rustc
}
missing() {
  local packages=()
  pick_rustc
  has_std "$rustc" || packages+=(rustc-web libstd-rust-web-dev:arm64)
  command -v aarch64-linux-gnu-gcc >/dev/null || packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
  command -v qemu-aarch64 >/dev/null || packages+=(qemu-user)
  # QEMU is given the whole root (-L /): with the cross libraries alone, threads hang on start.
  [ -e /lib/ld-linux-aarch64.so.1 ] || packages+=(libc6:arm64 libgcc-s1:arm64)
  echo "${packages[*]}"
}
command -v cargo >/dev/null || { echo "cargo is not installed; get Rust from https://rustup.rs" >&2; exit 2; }
packages=$(missing)
if [ -n "$packages" ] && [ -n "$install" ]; then
  [ "$(id -u)" = 0 ] || { echo "--install needs root" >&2; exit 2; }
  dpkg --add-architecture arm64
  apt-get update -qq
  # shellcheck disable=SC2086 # a list of packages
  apt-get install -y -qq --no-install-recommends $packages
  packages=$(missing)
fi
if [ -n "$packages" ]; then
  echo "missing: $packages" >&2
  echo "hint: run with --install, or: dpkg --add-architecture arm64 && apt-get update && apt-get install -y --no-install-recommends $packages" >&2
  exit 2
fi
pick_rustc

# A build directory of its own: another compiler would throw away what the usual one has built. Without link-time
# optimization, which takes most of a build's time and does not change a bit.
export RUSTC=$rustc
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/aarch64-qemu
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16

times=()
part() { # NAME COMMAND…: runs it and notes how long it took
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@" || { echo "== failed: $name, after $((SECONDS - start)) s" >&2; exit 1; }
  times+=("$((SECONDS - start)) s  $name")
}
part "build with $("$rustc" --version)" cargo test --release --target $target --lib --test it --no-run
for cpu in "${cpus[@]}"; do
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L / -cpu $cpu"
  part "$cpu, ${unit[*]}" cargo test --release --target $target --lib -- "${unit[@]}"
  for module in "${integration[@]}"; do
    part "$cpu, $module" cargo test --release --target $target --test it -- "$module::" "${skip[@]}"
  done
done
echo "== passed"
printf '   %s\n' "${times[@]}"
