//! AMX int8 tiles on 64-bit Linux, beside the AVX-512 VNNI kernels.
//!
//! The blocks of `asm!` below leave values in tile registers for each other. The compiler does not promise that they stay,
//! but it has no reason to touch a register file that no Rust type lives in and that it may not use without the AMX target
//! features, which are never enabled here; [`available`] compares one product before the set is offered.

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::panel::Codes;
use super::simd::{LANES, Simd, each, quad_of, unroll};
use super::tiles::{PlainTiles, Sums, Tile, Tiles};
use super::{GROUP, avx512, table, tiles};

table!(Isa::Amx, Amx, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni");

struct Amx;

impl Simd for Amx {
    avx512::lanes!();
    avx512::vnni_products!();

    const MANY: usize = 5;

    #[inline(always)]
    fn many_rows<C: Codes, const SCALED: bool>(
        w: &MatView<'_>,
        first: usize,
        x: &Input<'_>,
        tile: &mut TileMut<'_>,
        scratch: &mut Scratch,
    ) {
        tiles::matmul::<AmxTiles, Self, C, SCALED>(w, first, x, tile, scratch);
    }
}

/// The tile registers of this thread, configured. Only to be made where [`available`] is true.
struct AmxTiles(());

/// Palette 1: eight tiles of 16 rows × 64 bytes.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static SHAPES: Shapes = Shapes {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

impl Tiles for AmxTiles {
    #[inline(always)]
    fn configure() -> Self {
        // SAFETY: only reached through this file's table and `works`, which need `available`; the operand is the 64-byte
        // configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly)) };
        Self(())
    }

    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        // SAFETY: `self` proves that the tiles are configured.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nomem, nostack, preserves_flags)) };
    }

    #[inline(always)]
    fn load<const T: usize>(&mut self, from: &Tile) {
        // SAFETY: as in `zero`; 16 rows of 64 bytes, 64 apart, are the 1024 bytes of `from`.
        unsafe {
            asm!(
                "tileloadd tmm{t}, [{from} + {stride} * 1]",
                t = const T,
                from = in(reg) from,
                stride = in(reg) 64usize,
                options(nostack, readonly, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn dot<const C: usize, const A: usize, const W: usize>(&mut self) {
        // SAFETY: as in `zero`.
        unsafe {
            asm!(
                "tdpbssd tmm{c}, tmm{a}, tmm{w}",
                c = const C,
                a = const A,
                w = const W,
                options(nomem, nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn store<const T: usize>(&mut self, to: &mut Sums) {
        // SAFETY: as in `zero`; 16 rows of 64 bytes, 64 apart, are the 1024 bytes of `to`.
        unsafe {
            asm!(
                "tilestored [{to} + {stride} * 1], tmm{t}",
                t = const T,
                to = in(reg) to,
                stride = in(reg) 64usize,
                options(nostack, preserves_flags)
            );
        }
    }
}

impl Drop for AmxTiles {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the tiles were configured by this value.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// Whether CPU and system let this process use int8 tiles, and one product came out right.
pub(super) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| cpu_has_tiles() && system_grants_tiles() && works())
}

/// Tiles and int8 products in CPUID, their state enabled by the system.
fn cpu_has_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const TILE_AND_INT8: u32 = 1 << 24 | 1 << 25;
    const TILE_STATE: u32 = 1 << 17 | 1 << 18;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    if __cpuid_count(7, 0).edx & TILE_AND_INT8 != TILE_AND_INT8 {
        return false;
    }
    let state: u32;
    // SAFETY: OSXSAVE says that XGETBV exists; register 0 always does.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") state, out("edx") _, options(nomem, nostack));
    }
    state & TILE_STATE == TILE_STATE
}

/// Linux gives a process the large tile state only when it asks: `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)`.
#[cfg(target_os = "linux")]
fn system_grants_tiles() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: the call takes two numbers and touches no memory of this process; the registers that the kernel
    // overwrites are declared.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack)
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn system_grants_tiles() -> bool {
    false
}

/// One product of extreme and uneven values on tiles and in plain memory.
fn works() -> bool {
    let mut x: Tile = [[-127; 64]; 16];
    let mut w: Tile = [[-128; 64]; 16];
    for i in 0..16 {
        for j in 0..64 {
            if (i + j) % 3 > 0 {
                x[i][j] = (i * 64 + j * 7) as i8 | 1;
                w[i][j] = (i * 31 + j * 5) as i8;
            }
        }
    }
    fn product<T: Tiles>(x: &Tile, w: &Tile) -> Sums {
        let mut sums = [[0; 16]; 16];
        let mut tiles = T::configure();
        tiles.zero::<3>();
        tiles.load::<6>(x);
        tiles.load::<5>(w);
        tiles.dot::<3, 6, 5>();
        tiles.dot::<3, 6, 5>();
        tiles.store::<3>(&mut sums);
        sums
    }
    product::<AmxTiles>(&x, &w) == product::<PlainTiles>(&x, &w)
}
