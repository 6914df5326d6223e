#!/usr/bin/env bash
# Runs the kernel tests on a CPU with AVX-512: on this machine's own if it has F, BW, DQ and VL, else on one that Bochs
# emulates. The emulated Skylake-X boots a Linux kernel whose only program is the library's test binary; every kernel of
# the `portable`, `avx2` and `avx512` tables runs there. It has no VNNI (Bochs' models that have it do not boot Linux),
# so the `avx512vnni` table is tested only on a CPU of that kind.
#
# usage: tools/test-avx512.sh [--emulate] [FILTER…]
#   --emulate    emulate even if this CPU has AVX-512
#   FILTER       unit tests to run, default `kernels::`; about two minutes after the build, one of them to boot
# environment:
#   LIMIT        seconds that the emulated machine may run, default 1800
#   KERNEL       a Linux kernel (bzImage), default Debian's cloud kernel, downloaded once into the build directory
#
# Exit code: that of the tests; 2 for wrong usage or a missing package, 125 when the emulated machine did not finish.
set -euo pipefail
cd "$(dirname "$0")/.."

emulate=
filters=()
for arg in "$@"; do
  case $arg in
    --emulate) emulate=1 ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    -*) echo "unknown option $arg; see --help" >&2; exit 2 ;;
    *) filters+=("$arg") ;;
  esac
done
[ ${#filters[@]} -gt 0 ] || filters=(kernels::)
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "this script needs Linux on x86-64" >&2; exit 2; }

flags='avx512f avx512bw avx512dq avx512vl'
has_avx512=1
for flag in $flags; do grep -qw "$flag" /proc/cpuinfo || has_avx512=; done
if [ -n "$has_avx512" ] && [ -z "$emulate" ]; then
  echo "== this CPU has AVX-512: running natively (--emulate to emulate)"
  exec cargo test --release --lib -- "${filters[@]}" --nocapture
fi

# What the emulation needs, and in which Debian packages it is.
isolinux=/usr/lib/ISOLINUX/isolinux.bin
ldlinux=/usr/lib/syslinux/modules/bios/ldlinux.c32
bios=/usr/share/bochs/BIOS-bochs-latest
vga=/usr/share/bochs/VGABIOS-lgpl-latest
term=$(echo /usr/lib/*/bochs/plugins/libbx_term_gui.so*)
missing=()
need() { # PACKAGE PATH
  [ -e "${2%% *}" ] || missing+=("$1")
}
need bochs /usr/bin/bochs
need bochs-term "$term"
need bochsbios "$bios"
need vgabios "$vga"
need isolinux "$isolinux"
need syslinux-common "$ldlinux"
need xorriso /usr/bin/xorriso
need cpio "$(command -v cpio || echo /usr/bin/cpio)"
need busybox-static "$(command -v busybox || echo /bin/busybox)"
if [ ${#missing[@]} -gt 0 ]; then
  echo "missing: ${missing[*]}" >&2
  echo "hint: apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 2
fi

build=${CARGO_TARGET_DIR:-target}/avx512-bochs
mkdir -p "$build"
tmp=$(mktemp -d)
bochs_pid=
cleanup() {
  # Bochs does not end on a gentler signal.
  [ -z "$bochs_pid" ] || { kill -KILL "$bochs_pid" && wait "$bochs_pid"; } 2>/dev/null || true
  rm -rf "$tmp"
}
trap cleanup EXIT

kernel=${KERNEL:-$build/vmlinuz}
if [ ! -s "$kernel" ]; then
  package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
  [ -n "$package" ] || { echo "no linux-image-cloud-amd64 package here: set KERNEL to a Linux kernel" >&2; exit 2; }
  echo "== downloading $package"
  (cd "$tmp" && apt-get download -qq -o APT::Sandbox::User=root "$package" && dpkg-deb -x "$package"_*.deb kernel)
  cp "$tmp"/kernel/boot/vmlinuz-* "$kernel"
fi

echo "== building"
cargo test --release --lib --no-run
program=$(cargo test --release --lib --no-run --message-format=json 2>/dev/null | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
[ -x "$program" ] || { echo "cargo named no test binary" >&2; exit 1; }

# The initial RAM disk is the whole system: busybox, the program and the libraries it is linked with.
root=$tmp/root
mkdir -p "$root"/{bin,proc,sys,dev,tmp} "$tmp/iso"
cp "$(command -v busybox)" "$root/bin/busybox"
cp "$program" "$root/tests"
strip "$root/tests" 2>/dev/null || true # the release profile strips already
ldd "$program" | grep -o '/[^ )]*' | while read -r library; do
  mkdir -p "$root$(dirname "$library")"
  cp -L "$library" "$root$library"
done
cat > "$root/init" <<INIT
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
echo ===BEGIN
for flag in $flags; do
  grep -qw \$flag /proc/cpuinfo || { echo "the emulated CPU lacks \$flag"; echo "===EXIT 125"; poweroff -f; }
done
/tests$(printf ' %q' "${filters[@]}") --skip large_shapes --test-threads=1 --nocapture 2>&1
echo "===EXIT \$?"
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) > "$tmp/iso/initrd"

# Boot from a CD. Bochs emulates one old PC without the clocks and tables that a kernel looks for at length, hence: no
# APIC and no second processor, no calibration of clocks against each other, no mitigations, no waiting for a keyboard
# controller; the compact XSAVE forms and protection keys are hidden (clearcpuid), their emulation makes Linux stop.
cp "$kernel" "$tmp/iso/linux"
cp "$isolinux" "$ldlinux" "$tmp/iso/"
cat > "$tmp/iso/isolinux.cfg" <<'CFG'
DEFAULT tests
PROMPT 0
TIMEOUT 1
LABEL tests
 KERNEL linux
 INITRD initrd
 APPEND console=ttyS0 quiet panic=-1 nosmp noapic nokaslr mitigations=off clearcpuid=321,323,515 tsc=reliable lpj=1000000 lsm=capability i8042.noprobe cpufreq.off=1 random.trust_cpu=on
CFG
xorriso -as mkisofs -quiet -o "$tmp/boot.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
  -boot-info-table "$tmp/iso" 2> "$tmp/xorriso.log" || { cat "$tmp/xorriso.log" >&2; exit 1; }

serial=$tmp/serial
: > "$serial"
cat > "$tmp/bochsrc" <<RC
cpu: model=corei7_skylake_x, count=1, ips=10000000, reset_on_triple_fault=0
megs: 1024
romimage: file=$bios
vgaromimage: file=$vga
ata0-master: type=cdrom, path=$tmp/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$serial
display_library: term
log: $tmp/log
panic: action=fatal
RC
# Debian builds Bochs with its debugger, which waits for a command: continue.
echo c > "$tmp/go"
limit=${LIMIT:-1800}
SECONDS=0
echo "== booting an emulated Skylake-X, at most $limit s"
TERM=vt100 bochs -q -f "$tmp/bochsrc" -rc "$tmp/go" < /dev/null > "$tmp/screen" 2>&1 &
bochs_pid=$!

# Pass on what the machine prints between its marks, as it comes.
code=
begun=
while left=$((limit - SECONDS)) && [ "$left" -gt 0 ] && IFS= read -r -t "$left" line; do
  line=${line%$'\r'}
  case $line in
    *===BEGIN*) begun=1; echo "== booted after $SECONDS s" ;;
    *===EXIT*) code=${line##*===EXIT }; break ;;
    *) [ -z "$begun" ] || printf '%s\n' "$line" ;;
  esac
done < <(tail -n +1 -f -s 0.5 --pid="$bochs_pid" "$serial")
if [ -z "$code" ]; then
  echo "the emulated machine did not finish within $limit s; its last words:" >&2
  tail -n 5 "$serial" "$tmp/log" >&2
  exit 125
fi
echo "== emulated tests ended with exit code $code after $SECONDS s"
exit "$code"
