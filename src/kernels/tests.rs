//! Every instruction set of this CPU against the scalar definition, bit for bit.

use super::*;

/// xorshift64*, so that cases are the same on every machine.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn f32(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.f32() * scale).collect()
    }
}

/// The other tables of this CPU; says which, so that a green run on a weak machine is not mistaken for coverage.
fn others() -> Vec<&'static Kernels> {
    let others: Vec<_> =
        Isa::available().into_iter().skip(1).filter_map(Kernels::for_isa).collect();
    println!("against portable: {:?}", others.iter().map(|k| k.isa()).collect::<Vec<_>>());
    others
}

const FORMATS: [Format; 13] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Fp8,
    Format::Int8,
    Format::Int4 { group: 0 },
    Format::Int4 { group: 16 },
    Format::Int4 { group: 48 },
    Format::Int4 { group: 64 },
    Format::Int4 { group: 96 },
    Format::Int4 { group: 128 },
    Format::Int3,
    Format::Int2,
];

#[derive(Clone, Copy, Debug)]
enum Fill {
    Random,
    /// Every byte 0x80 or 0x7f: the extreme codes.
    Extreme,
    Zero,
    /// Every bit set, against activations of one sign: the largest sums of offset codes.
    Full,
    /// Every byte 0x80, against activations of one sign: the largest sums of signed bytes.
    Lowest,
}

/// Random codes that are valid numbers in their format (no NaN), and scales.
fn matrix(f: Format, rows: usize, cols: usize, fill: Fill, rng: &mut Rng) -> (Vec<u8>, Vec<f32>) {
    let n = rows * f.row_bytes(cols);
    let codes = match (f, fill) {
        (_, Fill::Zero) => vec![0; n],
        (Format::F32, _) => rng.vec(n / 4, 2.0).iter().flat_map(|v| v.to_le_bytes()).collect(),
        (Format::F16, _) => {
            rng.vec(n / 2, 2.0).iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect()
        }
        (Format::Bf16, _) => rng
            .vec(n / 2, 2.0)
            .iter()
            .flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())
            .collect(),
        (Format::Fp8, _) => (0..n).map(|_| rng.next() as u8 & 0xf7).collect(),
        (_, Fill::Extreme) => {
            (0..n).map(|_| if rng.next() & 1 == 0 { 0x80 } else { 0x7f }).collect()
        }
        (_, Fill::Full) => vec![0xff; n],
        (_, Fill::Lowest) => vec![0x80; n],
        (_, Fill::Random) => (0..n).map(|_| rng.next() as u8).collect(),
    };
    let scales = (0..f.n_scales(rows, cols))
        .map(|i| if i % 7 == 3 { 1e-40 } else { rng.f32() * 0.1 })
        .collect();
    (codes, scales)
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// The panels of a matrix as stored, packed by `k`.
fn panels(k: &Kernels, w: &MatView<'_>) -> Vec<u8> {
    let bytes = panel_bytes(w.format(), w.rows(), w.cols()).unwrap();
    let strip = bytes / w.rows().div_ceil(16);
    // What packing leaves out would show.
    let pack = |fill: u8| {
        let mut out = vec![fill; bytes];
        out.chunks_mut(strip).enumerate().for_each(|(s, out)| k.pack_strip(w, s, out));
        out
    };
    let out = pack(0xff);
    assert!(out == pack(0), "{} {}×{}: a byte is not written", w.format(), w.rows(), w.cols());
    out
}

/// The product of all rows of `w` with the `s` rows of `x`.
fn product(k: &Kernels, w: &MatView<'_>, x: &[f32], s: usize, mode: Activations) -> Vec<f32> {
    let mut acts = Acts::default();
    acts.fill(s, w.cols()).copy_from_slice(x);
    assert!(acts.prepare(k, mode));
    let mut y = vec![0.0; s * w.rows()];
    k.matmul(w, 0, &acts.input(0), &mut TileMut::whole(&mut y, w.rows()));
    y
}

/// (rows, cols, batch): every tail of strips, blocks, groups and tiles, small enough for an emulated CPU.
const SHAPES: [(usize, usize, usize); 9] = [
    (1, 16, 1),
    (2, 17, 2),
    (3, 64, 3),
    (5, 129, 4),
    (15, 80, 5),
    (17, 192, 8),
    (16, 64, 13),
    (18, 130, 1),
    (33, 65, 2),
];

/// The same, as large as matters for caches, prefetching and blocks of rows.
const LARGE_SHAPES: [(usize, usize, usize); 10] = [
    (16, 64, 7),
    (31, 200, 9),
    (32, 128, 13),
    (33, 1031, 1),
    (33, 96, 70),
    (48, 65, 16),
    (7, 8200, 2),
    (18, 4099, 6),
    (130, 130, 1),
    (64, 256, 110),
];

#[test]
fn products_are_equal_for_every_format_layout_shape_and_batch() {
    products_are_equal(&SHAPES);
}

/// `tools/test-avx512.sh` leaves this one out when it emulates.
#[test]
fn products_of_large_shapes_are_equal() {
    products_are_equal(&LARGE_SHAPES);
}

fn products_are_equal(shapes: &[(usize, usize, usize)]) {
    let others = others();
    let reference = Kernels::for_isa(Isa::Portable).unwrap();
    let mut rng = Rng(7);
    for f in FORMATS {
        for &(rows, cols, s) in shapes {
            for fill in [Fill::Random, Fill::Extreme, Fill::Zero, Fill::Full, Fill::Lowest] {
                let (codes, scales) = matrix(f, rows, cols, fill, &mut rng);
                let w = MatView::new(f, rows, cols, &codes, &scales);
                let x = match fill {
                    Fill::Full | Fill::Lowest => {
                        (0..s * cols).map(|i| if i / cols % 2 == 0 { 1.0 } else { -1.0 }).collect()
                    }
                    Fill::Extreme => (0..s * cols)
                        .map(|_| if rng.next() & 1 == 0 { 1.0 } else { -1.0 })
                        .collect(),
                    _ => rng.vec(s * cols, 3.0),
                };
                let packed = f.is_integer().then(|| panels(reference, &w));
                let in_panels = packed.as_ref().map(|p| MatView::panels(f, rows, cols, p));
                for k in &others {
                    let same = packed.as_ref().is_none_or(|p| *p == panels(k, &w));
                    assert!(same, "panels of {f} {rows}×{cols} {}", k.isa());
                }
                for mode in [Activations::Q8, Activations::F32] {
                    let want = bits(&product(reference, &w, &x, s, mode));
                    let at = format!("{f} {rows}×{cols} s={s} {fill:?} {mode:?}");
                    for k in std::iter::once(&reference).chain(&others) {
                        let isa = k.isa();
                        assert_eq!(bits(&product(k, &w, &x, s, mode)), want, "{at} {isa}");
                        if let Some(w) = &in_panels {
                            let got = bits(&product(k, w, &x, s, mode));
                            assert_eq!(got, want, "{at} {isa} in panels");
                        }
                    }
                }
            }
        }
    }
}

/// The blocking and scaling of the tile kernel over tiles in plain memory, so that they are tested on every machine.
#[test]
fn products_on_tiles_are_equal() {
    use super::panel::{Codes, Int4Codes, Int8Codes};
    use super::simd::Scalar;
    use super::tiles::{self, PlainTiles};
    fn run<C: Codes, const SCALED: bool>(f: Format, rng: &mut Rng) {
        let k = Kernels::for_isa(Isa::Portable).unwrap();
        // Row tiles and batches of blocks with and without a rest, more rows than are taken at once.
        for (rows, cols, s) in [(16, 64, 1), (33, 1100, 17), (20, 2112, 70), (5, 200, 16)] {
            let (codes, scales) = matrix(f, rows, cols, Fill::Random, rng);
            let stored = MatView::new(f, rows, cols, &codes, &scales);
            let packed = panels(k, &stored);
            let w = MatView::panels(f, rows, cols, &packed);
            let x = rng.vec(s * cols, 3.0);
            let mut acts = Acts::default();
            acts.fill(s, cols).copy_from_slice(&x);
            assert!(acts.prepare(k, Activations::Q8));
            let all = product(k, &w, &x, s, Activations::Q8);
            for first in [0, 3] {
                let n = rows - first;
                let mut y = vec![0.0; s * n];
                tiles::matmul::<PlainTiles, Scalar, C, SCALED>(
                    &w,
                    first,
                    &acts.input(0),
                    &mut TileMut::whole(&mut y, n),
                    &mut Scratch::default(),
                );
                let want: Vec<f32> =
                    all.chunks(rows).flat_map(|row| &row[first..]).copied().collect();
                assert_eq!(bits(&y), bits(&want), "{f} {rows}×{cols} s={s} from {first}");
            }
        }
    }
    let mut rng = Rng(19);
    run::<Int4Codes, true>(Format::Int4 { group: 64 }, &mut rng);
    run::<Int4Codes, false>(Format::Int4 { group: 0 }, &mut rng);
    run::<Int8Codes, false>(Format::Int8, &mut rng);
}

#[test]
fn a_part_of_a_product_is_the_same_bits() {
    let mut rng = Rng(9);
    let (rows, cols, s) = (70, 192, 11);
    for f in FORMATS {
        let (codes, scales) = matrix(f, rows, cols, Fill::Random, &mut rng);
        let stored = MatView::new(f, rows, cols, &codes, &scales);
        let packed = f.is_integer().then(|| panels(Kernels::best(), &stored));
        let x = rng.vec(s * cols, 3.0);
        for w in [Some(stored), packed.as_ref().map(|p| MatView::panels(f, rows, cols, p))] {
            let Some(w) = w else { continue };
            for k in Isa::available().into_iter().filter_map(Kernels::for_isa) {
                let all = product(k, &w, &x, s, Activations::Q8);
                let mut acts = Acts::default();
                acts.fill(s, cols).copy_from_slice(&x);
                assert!(acts.prepare(k, Activations::Q8));
                // Some outputs of some rows: neither begins nor ends with a strip.
                for (first, n) in [(0, 70), (5, 3), (5, 40), (15, 2), (16, 16), (33, 37)] {
                    let pick = [10u32, 3, 3, 7];
                    let mut y = vec![9.0; pick.len() * n];
                    let x = acts.picked(&pick);
                    k.matmul(&w, first, &x, &mut TileMut::whole(&mut y, n));
                    let want: Vec<f32> = pick
                        .iter()
                        .flat_map(|&r| &all[r as usize * rows + first..][..n])
                        .copied()
                        .collect();
                    assert_eq!(bits(&y), bits(&want), "{f} {first}+{n} {}", k.isa());
                }
            }
        }
    }
}

#[test]
fn panels_give_the_rows_back() {
    let mut rng = Rng(13);
    for f in FORMATS.into_iter().filter(|f| f.is_integer()) {
        for (rows, cols) in [(1, 16), (33, 200), (16, 129)] {
            let (codes, scales) = matrix(f, rows, cols, Fill::Random, &mut rng);
            let w = MatView::new(f, rows, cols, &codes, &scales);
            let k = Kernels::best();
            let packed = panels(k, &w);
            let p = MatView::panels(f, rows, cols, &packed);
            for r in 0..rows {
                let row = |w: &MatView<'_>| {
                    let mut out = vec![0.0; cols];
                    k.dequant_row(w, r, &mut out);
                    bits(&out)
                };
                assert_eq!(row(&w), row(&p), "{f} {rows}×{cols} row {r}");
            }
        }
    }
}

#[test]
fn quantized_products_are_close_to_exact_ones() {
    let k = Kernels::best();
    let mut rng = Rng(11);
    for f in FORMATS.into_iter().filter(|f| f.is_integer()) {
        let (rows, cols) = (9, 320);
        let (codes, _) = matrix(f, rows, cols, Fill::Random, &mut rng);
        let scales = vec![0.01; f.n_scales(rows, cols)];
        let w = MatView::new(f, rows, cols, &codes, &scales);
        let x = rng.vec(cols, 1.0);
        let product = |mode| product(k, &w, &x, 1, mode);
        let (q8, exact) = (product(Activations::Q8), product(Activations::F32));
        let norm = exact.iter().map(|v| v * v).sum::<f32>().sqrt();
        let err = q8.iter().zip(&exact).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt();
        assert!(err < 0.02 * norm, "{f}: {err} of {norm}");
    }
}

#[test]
fn row_primitives_are_equal() {
    let others = others();
    let p = Kernels::for_isa(Isa::Portable).unwrap();
    let mut rng = Rng(3);
    for n in [1usize, 5, 16, 17, 31, 64, 100, 576, 1033] {
        let (a, b, c) = (rng.vec(n, 9.0), rng.vec(n, 2.0), rng.vec(n, 1.0));
        for k in &others {
            let at = format!("{} n={n}", k.isa());
            assert_eq!(k.dot(&a, &b).to_bits(), p.dot(&a, &b).to_bits(), "dot {at}");
            let both = |f: &dyn Fn(&Kernels) -> Vec<f32>| (bits(&f(k)), bits(&f(p)));
            let (x, y) = both(&|k| {
                let mut y = c.clone();
                k.axpy(0.37, &a, &mut y);
                y
            });
            assert_eq!(x, y, "axpy {at}");
            let (x, y) = both(&|k| {
                let mut y = vec![0.0; n];
                assert!(k.rms_norm(&a, &b, 1e-5, &mut y));
                y
            });
            assert_eq!(x, y, "rms_norm {at}");
            let (x, y) = both(&|k| {
                let mut y = a.clone();
                k.layer_norm(&mut y, &b, &c, 1e-6);
                y
            });
            assert_eq!(x, y, "layer_norm {at}");
            let (x, y) = both(&|k| {
                let mut y = a.iter().map(|v| v * 12.0).collect::<Vec<_>>();
                k.silu_mul(&mut y, &b);
                y
            });
            assert_eq!(x, y, "silu_mul {at}");
        }
    }
}

#[test]
fn attention_is_equal_and_close_to_f64() {
    let others = others();
    let p = Kernels::for_isa(Isa::Portable).unwrap();
    let mut rng = Rng(5);
    for (rank, width) in [(20, 26), (64, 80), (7, 7), (130, 147)] {
        for n in [1usize, 2, 63, 64, 65, 200] {
            let data = rng.vec(n * width, 1.0);
            let half: Vec<u16> = data.iter().map(|&v| half::f16::from_f32(v).to_bits()).collect();
            let queries = [1usize, 2, 3, 6][n % 4];
            let q = rng.vec(queries * width, 3.0 / (width as f32).sqrt());
            let chosen: Vec<u32> = (0..n as u32).filter(|t| t % 3 != 1).collect();
            let first: Vec<usize> = (0..queries).map(|i| n.saturating_sub(2 * i).max(1)).collect();
            for seen in [Seen::First(&first), Seen::Chosen(&chosen)] {
                for keys in [Keys::F32 { data: &data, width }, Keys::F16 { data: &half, width }] {
                    let run = |k: &Kernels, q: &[f32], seen: &Seen<'_>| {
                        let mut out = vec![0.0; q.len() / width * rank];
                        k.attend(q, &keys, seen, 0.9, &mut out);
                        out
                    };
                    let want = run(p, &q, &seen);
                    for k in &others {
                        let got = run(k, &q, &seen);
                        assert_eq!(bits(&got), bits(&want), "attend {} n={n}", k.isa());
                    }
                    for i in 0..queries {
                        // A query alone has the bits that it has in company.
                        let q = &q[i * width..(i + 1) * width];
                        let alone = match seen {
                            Seen::First(n) => Seen::First(&n[i..=i]),
                            chosen => chosen,
                        };
                        let want = &want[i * rank..(i + 1) * rank];
                        assert_eq!(bits(&run(Kernels::best(), q, &alone)), bits(want));
                        let positions: Vec<usize> = match seen {
                            Seen::First(n) => (0..n[i]).collect(),
                            Seen::Chosen(c) => c.iter().map(|&t| t as usize).collect(),
                        };
                        close_to_f64(q, &keys, &positions, want);
                    }
                }
            }
            let iq = rng.vec(5 * width, 1.0);
            let iw = rng.vec(5, 1.0);
            for keys in [Keys::F32 { data: &data, width }, Keys::F16 { data: &half, width }] {
                let run = |k: &Kernels, first: usize| {
                    let mut out = vec![0.0; n - first];
                    k.index_scores(&iq, &iw, &keys, first, 0.25, &mut out);
                    bits(&out)
                };
                let want = run(p, 0);
                for k in &others {
                    assert_eq!(run(k, 0), want, "index_scores {} n={n}", k.isa());
                    assert_eq!(run(k, n / 3), want[n / 3..], "index_scores {} from {n}/3", k.isa());
                }
            }
        }
    }
}

/// Attention of one query in f64.
fn close_to_f64(q: &[f32], keys: &Keys<'_>, positions: &[usize], got: &[f32]) {
    let mut sum = 0.0;
    let mut mean = vec![0.0; got.len()];
    for &t in positions {
        let row: Vec<f64> = match *keys {
            Keys::F32 { data, width } => {
                data[t * width..][..width].iter().map(|&v| f64::from(v)).collect()
            }
            Keys::F16 { data, width } => data[t * width..][..width]
                .iter()
                .map(|&v| half::f16::from_bits(v).to_f64())
                .collect(),
        };
        let s: f64 = row.iter().zip(q).map(|(a, &b)| a * f64::from(b)).sum();
        let e = (s * f64::from(0.9f32)).exp();
        sum += e;
        mean.iter_mut().zip(&row).for_each(|(m, v)| *m += e * v);
    }
    for (got, want) in got.iter().zip(&mean) {
        assert!((f64::from(*got) - want / sum).abs() < 1e-5, "{} keys", positions.len());
    }
}

#[test]
fn queries_move_into_latent_space_alike() {
    let others = others();
    let p = Kernels::for_isa(Isa::Portable).unwrap();
    let mut rng = Rng(17);
    for f in FORMATS {
        for (cols, terms, n) in [(64, 12, 1), (70, 130, 2), (147, 65, 5), (16, 1, 9)] {
            let rows = terms + 3;
            let (codes, scales) = matrix(f, rows, cols, Fill::Random, &mut rng);
            let w = MatView::new(f, rows, cols, &codes, &scales);
            let (q_stride, out_stride) = (terms + 2, cols + 4);
            let q = rng.vec(n * q_stride, 1.0);
            let run = |k: &Kernels| {
                let mut out = vec![7.0; n * out_stride];
                let mut to = Strided { data: &mut out[..], stride: out_stride };
                k.absorb(&w, 2, terms, &Strided { data: &q, stride: q_stride }, &mut to, n);
                out
            };
            // The definition: one chain per element, rows ascending.
            let mut want = vec![7.0; n * out_stride];
            let mut row = vec![0.0; cols];
            for i in 0..n {
                want[i * out_stride..][..cols].fill(0.0);
                for k in 0..terms {
                    p.dequant_row(&w, 2 + k, &mut row);
                    p.axpy(q[i * q_stride + k], &row, &mut want[i * out_stride..][..cols]);
                }
            }
            for k in std::iter::once(&p).chain(&others) {
                assert_eq!(bits(&run(k)), bits(&want), "{f} {terms}×{cols} n={n} {}", k.isa());
            }
        }
    }
}

#[test]
fn f16_conversion_is_exact_for_every_value() {
    let codes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let w = MatView::new(Format::F16, 1, 65536, &codes, &[]);
    for k in Isa::available().into_iter().filter_map(Kernels::for_isa) {
        let mut out = vec![0.0; 65536];
        k.dequant_row(&w, 0, &mut out);
        for (b, v) in out.iter().enumerate() {
            let want = half::f16::from_bits(b as u16).to_f32();
            assert!(
                v.to_bits() == want.to_bits() || (v.is_nan() && want.is_nan()),
                "{b:#x}: {v} {want}"
            );
        }
    }
}

#[test]
fn non_finite_activations_are_seen() {
    let k = Kernels::best();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut acts = Acts::default();
        acts.fill(2, 70)[99] = bad;
        for mode in [Activations::Q8, Activations::F32] {
            assert!(!acts.prepare(k, mode));
        }
    }
}
