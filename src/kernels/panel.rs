//! The layout of integer matrices in memory: strips of 16 rows, cut into blocks of 64 inputs.
//!
//! A block holds the codes of 16 rows × 64 inputs as unsigned numbers (code + offset), followed by the scales that apply
//! to it, 16 f32 at a time. Reading a matrix front to back is then one stream per strip, a vector register holds the
//! same four inputs of all 16 rows, and the scales of 16 outputs are one load. The codes of inputs `4k..4k+4` (a quad)
//! of row `r` are the four bytes `4r..4r+4` of a 64-byte vector; formats below 8 bits share a vector between quads:
//!
//! | format | code bytes per block | quad k |
//! |---|---|---|
//! | int8 | 1024 | vector k |
//! | int4 | 512 | vector k/2, nibble k%2 (low first) |
//! | int3 | 256 + 128 | two bits as int2, third bit: bit k%8 of vector 4 + k/8 |
//! | int2 | 256 | vector k/4, bit pair k%4 |
//!
//! Formats with one scale per row keep the strip's 16 scales behind its last block. Rows and inputs beyond the matrix
//! have the code of zero and scale 0. The layout is a permutation of the stored codes: nothing is rounded.
#![forbid(unsafe_code)]

use super::format::{Format, GROUP, MatView};
use super::simd::{BYTES, LANES, NIBBLES, Simd, WORDS, each};

/// Bytes of one vector of codes: four inputs of 16 rows.
pub(super) const VECTOR: usize = 64;
/// Bytes of the scales of 16 rows.
const SCALES: usize = 4 * LANES;

/// Sizes of a matrix in panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Blocks per strip: inputs / 64, rounded up.
    pub(super) blocks: usize,
    /// Bytes of the codes of one block.
    pub(super) codes: usize,
    /// Vectors of 16 scales in one block.
    pub(super) steps: usize,
    /// Bytes of one strip.
    pub(super) strip: usize,
}

impl Geometry {
    /// The sizes for an integer format, `None` for the others: they are read as stored.
    pub(super) fn new(format: Format, cols: usize) -> Option<Self> {
        let (codes, steps) = match format {
            Format::Int8 => (16 * VECTOR, 0),
            Format::Int4 { group } => (8 * VECTOR, steps_per_block(group)),
            Format::Int3 => (6 * VECTOR, 1),
            Format::Int2 => (4 * VECTOR, 0),
            _ => return None,
        };
        let blocks = cols.div_ceil(GROUP);
        let per_row = if steps == 0 { SCALES } else { 0 };
        Some(Self { blocks, codes, steps, strip: blocks * (codes + steps * SCALES) + per_row })
    }

    /// Bytes from one block to the next.
    pub(super) fn stride(&self) -> usize {
        self.codes + self.steps * SCALES
    }
}

/// Bytes of a `rows`×`cols` matrix in panels; `None` for formats that stay as stored.
pub fn panel_bytes(format: Format, rows: usize, cols: usize) -> Option<usize> {
    Geometry::new(format, cols).map(|g| rows.div_ceil(LANES) * g.strip)
}

/// Most scales that one block of an int4 row needs.
fn steps_per_block(group: u32) -> usize {
    match group as usize {
        0 => 0,
        g if g.is_multiple_of(GROUP) => 1,
        g if g < GROUP / 2 => GROUP / g,
        _ => 2,
    }
}

/// The steps of block `b` of a row of `cols` inputs: (first input, end, index of the weight group), ascending.
///
/// A step is a maximal run of inputs inside one weight group and one activation group.
pub(super) fn steps(
    group: usize,
    b: usize,
    cols: usize,
) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut at = b * GROUP;
    let end = ((b + 1) * GROUP).min(cols);
    std::iter::from_fn(move || {
        let first = at;
        if first >= end {
            return None;
        }
        at = ((first / group + 1) * group).min(end);
        Some((first, at, first / group))
    })
}

/// Whether strips of a matrix as stored are packed by whole vectors: faster than it is to compute with its rows.
#[inline(always)]
pub(super) fn packs_fast(w: &MatView<'_>) -> bool {
    let whole = match w.format() {
        Format::Int8 => true,
        Format::Int4 { group } => (group as usize).is_multiple_of(GROUP),
        _ => false,
    };
    whole && w.cols().is_multiple_of(GROUP)
}

/// Writes strip `s` of a stored integer matrix as panels. `codes` has room for one row in whole groups.
#[inline(always)]
pub(super) fn pack_strip<S: Simd>(w: &MatView<'_>, s: usize, out: &mut [u8], codes: &mut [i8]) {
    let Some(g) = Geometry::new(w.format(), w.cols()) else { return };
    let rows = LANES.min(w.rows() - s * LANES);
    if rows == LANES && packs_fast(w) {
        return pack_whole::<S>(w, s, out, &g);
    }
    // What the loops below do not overwrite must be the code of zero.
    let (stride, group) = (g.stride(), group_of(w.format()));
    out.fill(0);
    for r in 0..LANES {
        for b in 0..g.blocks {
            put_group(w.format(), &mut out[b * stride..], r, &[offset(w.format()); GROUP]);
        }
    }
    for r in 0..rows {
        let row = s * LANES + r;
        super::portable::unpack_row(w, row, codes);
        for (b, codes) in codes.as_chunks::<GROUP>().0.iter().enumerate() {
            let biased = codes.map(|c| (c as u8).wrapping_add(offset(w.format())));
            put_group(w.format(), &mut out[b * stride..], r, &biased);
        }
        let scales = w.row_scales(row);
        if g.steps == 0 {
            put_f32(&mut out[g.blocks * stride..], r, scales[0]);
            continue;
        }
        for b in 0..g.blocks {
            for (i, (_, _, at)) in steps(group, b, w.cols()).enumerate() {
                put_f32(&mut out[b * stride + g.codes + i * SCALES..], r, scales[at]);
            }
        }
    }
}

/// A strip of 16 rows of whole groups, 8 rows at a time.
#[inline(always)]
fn pack_whole<S: Simd>(w: &MatView<'_>, s: usize, out: &mut [u8], g: &Geometry) {
    let stride = g.stride();
    // Rows are too short for the processor to see eight streams: the next eight are fetched meanwhile.
    let ahead = 8 * w.format().row_bytes(w.cols());
    for half in 0..2 {
        let first = s * LANES + 8 * half;
        let rows = each!(r in 0..8, w.row_codes(first + r).as_chunks::<32>().0);
        for b in 0..g.blocks {
            let block = &mut out[b * stride..][..g.codes];
            for row in &rows {
                S::prefetch(&row[b], ahead);
            }
            if w.format() == Format::Int8 {
                let at = [32 * half, 32 * half + 8 * VECTOR];
                S::pack8::<BYTES>(each!(r in 0..8, &rows[r][2 * b]), block, at[0], VECTOR);
                S::pack8::<BYTES>(each!(r in 0..8, &rows[r][2 * b + 1]), block, at[1], VECTOR);
            } else {
                S::pack8::<NIBBLES>(each!(r in 0..8, &rows[r][b]), block, 32 * half, VECTOR);
            }
        }
    }
    pack_scales::<S>(w, s, out, g);
}

/// The scales of a strip of 16 rows of whole groups.
#[inline(always)]
fn pack_scales<S: Simd>(w: &MatView<'_>, s: usize, out: &mut [u8], g: &Geometry) {
    let stride = g.stride();
    let mut done = 0;
    if g.steps == 1 && group_of(w.format()) == GROUP {
        for half in 0..2 {
            let first = s * LANES + 8 * half;
            let rows = each!(r in 0..8, w.row_scales(first + r).as_chunks::<8>().0);
            for b in 0..g.blocks / 8 {
                let words = each!(r in 0..8, bytes_of(&rows[r][b]));
                let at = 8 * b * stride + g.codes + 32 * half;
                S::pack8::<WORDS>(each!(r in 0..8, &words[r]), out, at, stride);
            }
        }
        done = g.blocks / 8 * 8;
    }
    let wide = group_of(w.format()) / GROUP;
    for r in 0..LANES {
        let scales = w.row_scales(s * LANES + r);
        if g.steps == 0 {
            put_f32(&mut out[g.blocks * stride..], r, scales[0]);
            continue;
        }
        for b in done..g.blocks {
            put_f32(&mut out[b * stride + g.codes..], r, scales[b / wide]);
        }
    }
}

#[inline(always)]
fn bytes_of(values: &[f32; 8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    for i in 0..8 {
        let [a, b, c, d] = values[i].to_le_bytes();
        bytes[4 * i] = a;
        bytes[4 * i + 1] = b;
        bytes[4 * i + 2] = c;
        bytes[4 * i + 3] = d;
    }
    bytes
}

#[inline(always)]
fn put_f32(out: &mut [u8], i: usize, v: f32) {
    out.as_chunks_mut::<4>().0[i] = v.to_le_bytes();
}

/// Nibbles 0…7 of a word (lowest first) in the order 0 4 1 5 2 6 3 7: byte j holds inputs j and 4 + j.
#[inline(always)]
pub(super) fn deal_nibbles(w: u32) -> u32 {
    let spread = |v: u32| {
        let v = (v | v << 8) & 0x00ff_00ff;
        (v | v << 4) & 0x0f0f_0f0f
    };
    spread(w & 0xffff) | spread(w >> 16) << 4
}

/// What is added to a signed code to store it.
fn offset(f: Format) -> u8 {
    match f {
        Format::Int8 => 128,
        Format::Int4 { .. } => 8,
        Format::Int3 => 4,
        _ => 2,
    }
}

/// Writes the 64 biased codes of row `r` into a block, replacing what was there.
fn put_group(f: Format, block: &mut [u8], r: usize, codes: &[u8; GROUP]) {
    for (i, &c) in codes.iter().enumerate() {
        let (k, j) = (i / 4, 4 * r + i % 4);
        let put = |byte: &mut u8, bits: u8, at: usize, v: u8| {
            let mask = ((1u16 << bits) - 1) as u8;
            *byte = *byte & !(mask << at) | (v & mask) << at;
        };
        match f {
            Format::Int8 => block[VECTOR * k + j] = c,
            Format::Int4 { .. } => put(&mut block[VECTOR * (k / 2) + j], 4, 4 * (k % 2), c),
            Format::Int3 => {
                put(&mut block[VECTOR * (k / 4) + j], 2, 2 * (k % 4), c);
                put(&mut block[VECTOR * (4 + k / 8) + j], 1, k % 8, c >> 2);
            }
            _ => put(&mut block[VECTOR * (k / 4) + j], 2, 2 * (k % 4), c),
        }
    }
}

/// A register of codes: bytes of one or several rows.
pub(super) trait Vector: Copy {
    fn load(bytes: &[u8], at: usize) -> Self;
    /// Every 16-bit lane shifted right by `n` bits; bits that cross a byte must be masked by the caller.
    fn shr(self, n: usize) -> Self;
    /// Every 16-bit lane shifted left by `n` bits.
    fn shl(self, n: usize) -> Self;
    fn and(self, mask: u8) -> Self;
    fn or(self, other: Self) -> Self;
}

impl Vector for [u8; VECTOR] {
    #[inline(always)]
    fn load(bytes: &[u8], at: usize) -> Self {
        let mut v = [0; VECTOR];
        v.copy_from_slice(&bytes[at..at + VECTOR]);
        v
    }

    #[inline(always)]
    fn shr(self, n: usize) -> Self {
        self.map(|b| b >> n)
    }

    #[inline(always)]
    fn shl(self, n: usize) -> Self {
        self.map(|b| b << n)
    }

    #[inline(always)]
    fn and(self, mask: u8) -> Self {
        self.map(|b| b & mask)
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] | other[i])
    }
}

/// How the codes of a block are taken apart. The formats of one code width share it.
pub(super) trait Codes {
    /// Bytes of the codes of one block.
    const BYTES: usize;
    /// Offset of the stored codes.
    const OFFSET: i32;

    /// Quad `k` of the block's rows, as unsigned bytes; `at` is the first byte of each vector that is wanted.
    fn quad<V: Vector>(codes: &[u8], k: usize, at: usize) -> V;

    /// What the sums start with: `-OFFSET Σq`, from `bias` = -8 Σq.
    #[inline(always)]
    fn start(bias: i32) -> i32 {
        // Exact: OFFSET is a power of two and the bias a multiple of 8.
        if Self::OFFSET >= 8 { bias * (Self::OFFSET / 8) } else { bias / (8 / Self::OFFSET) }
    }
}

pub(super) struct Int8Codes;
pub(super) struct Int4Codes;
pub(super) struct Int3Codes;
pub(super) struct Int2Codes;

impl Codes for Int8Codes {
    const BYTES: usize = 16 * VECTOR;
    const OFFSET: i32 = 128;

    #[inline(always)]
    fn quad<V: Vector>(codes: &[u8], k: usize, at: usize) -> V {
        V::load(codes, VECTOR * k + at)
    }
}

impl Codes for Int4Codes {
    const BYTES: usize = 8 * VECTOR;
    const OFFSET: i32 = 8;

    #[inline(always)]
    fn quad<V: Vector>(codes: &[u8], k: usize, at: usize) -> V {
        V::load(codes, VECTOR * (k / 2) + at).shr(4 * (k % 2)).and(15)
    }
}

impl Codes for Int3Codes {
    const BYTES: usize = 6 * VECTOR;
    const OFFSET: i32 = 4;

    #[inline(always)]
    fn quad<V: Vector>(codes: &[u8], k: usize, at: usize) -> V {
        let high = V::load(codes, VECTOR * (4 + k / 8) + at).shr(k % 8).and(1).shl(2);
        Int2Codes::quad::<V>(codes, k, at).or(high)
    }
}

impl Codes for Int2Codes {
    const BYTES: usize = 4 * VECTOR;
    const OFFSET: i32 = 2;

    #[inline(always)]
    fn quad<V: Vector>(codes: &[u8], k: usize, at: usize) -> V {
        V::load(codes, VECTOR * (k / 4) + at).shr(2 * (k % 4)).and(3)
    }
}

/// Row `r` of a matrix in panels as signed codes, whole groups.
pub(super) fn unpack_row(w: &MatView<'_>, r: usize, out: &mut [i8]) {
    let Some(g) = Geometry::new(w.format(), w.cols()) else { return };
    let strip = w.strip(r / LANES);
    let lane = r % LANES;
    let read = |block: &[u8], i: usize| -> u8 {
        let (k, j) = (i / 4, 4 * lane + i % 4);
        let two = |k: usize| block[VECTOR * (k / 4) + j] >> (2 * (k % 4)) & 3;
        match w.format() {
            Format::Int8 => block[VECTOR * k + j],
            Format::Int4 { .. } => block[VECTOR * (k / 2) + j] >> (4 * (k % 2)) & 15,
            Format::Int3 => two(k) | (block[VECTOR * (4 + k / 8) + j] >> (k % 8) & 1) << 2,
            _ => two(k),
        }
    };
    for (b, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
        let block = &strip[b * g.stride()..];
        for (i, o) in out.iter_mut().enumerate() {
            *o = read(block, i).wrapping_sub(offset(w.format())) as i8;
        }
    }
}

/// The scales of row `r` of a matrix in panels, in stored order.
pub(super) fn unpack_scales(w: &MatView<'_>, r: usize, out: &mut [f32]) {
    let Some(g) = Geometry::new(w.format(), w.cols()) else { return };
    let strip = w.strip(r / LANES);
    let read = |at: usize| {
        let lane = &strip[at + 4 * (r % LANES)..][..4];
        f32::from_le_bytes([lane[0], lane[1], lane[2], lane[3]])
    };
    if g.steps == 0 {
        out[0] = read(g.blocks * g.stride());
        return;
    }
    for b in 0..g.blocks {
        for (i, (_, _, at)) in steps(group_of(w.format()), b, w.cols()).enumerate() {
            out[at] = read(b * g.stride() + g.codes + i * SCALES);
        }
    }
}

/// Inputs per scale of the formats that have several per row.
pub(super) fn group_of(f: Format) -> usize {
    match f {
        Format::Int4 { group: group @ 1.. } => group as usize,
        _ => GROUP,
    }
}
