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

#[test]
fn products_are_equal_for_every_format_shape_and_batch() {
    let others = others();
    let reference = Kernels::for_isa(Isa::Portable).unwrap();
    let mut rng = Rng(7);
    for f in FORMATS {
        for (rows, cols) in [(1, 16), (3, 64), (17, 80), (5, 129), (33, 200), (2, 1031), (130, 130)]
        {
            for fill in [Fill::Random, Fill::Extreme, Fill::Zero] {
                let (codes, scales) = matrix(f, rows, cols, fill, &mut rng);
                let w = MatView::new(f, rows, cols, &codes, &scales);
                for s in [1usize, 2, 5] {
                    let x = match fill {
                        Fill::Extreme => (0..s * cols)
                            .map(|_| if rng.next() & 1 == 0 { 1.0 } else { -1.0 })
                            .collect(),
                        _ => rng.vec(s * cols, 3.0),
                    };
                    for mode in [Activations::Q8, Activations::F32] {
                        let run = |k: &Kernels| {
                            let mut acts = Acts::default();
                            acts.fill(s, cols).copy_from_slice(&x);
                            assert!(acts.prepare(k, mode));
                            let mut y = vec![0.0; s * rows];
                            k.matmul(&w, 0, &acts.input(0), &mut TileMut::whole(&mut y, rows));
                            y
                        };
                        let want = run(reference);
                        for k in &others {
                            assert_eq!(
                                bits(&run(k)),
                                bits(&want),
                                "{f} {rows}×{cols} s={s} {fill:?} {mode:?} {}",
                                k.isa()
                            );
                        }
                        // A row gives the same bits alone.
                        let mut acts = Acts::default();
                        acts.fill(s, cols).copy_from_slice(&x);
                        assert!(acts.prepare(reference, mode));
                        let mut y = vec![0.0; rows];
                        reference.matmul(
                            &w,
                            0,
                            &acts.picked(&[s as u32 - 1]),
                            &mut TileMut::whole(&mut y, rows),
                        );
                        assert_eq!(bits(&y), bits(&want[(s - 1) * rows..]), "{f} row alone");
                    }
                }
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
        let product = |mode| {
            let mut acts = Acts::default();
            acts.fill(1, cols).copy_from_slice(&x);
            assert!(acts.prepare(k, mode));
            let mut y = vec![0.0; rows];
            k.matmul(&w, 0, &acts.input(0), &mut TileMut::whole(&mut y, rows));
            y
        };
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
    let (rank, width) = (20, 26);
    for n in [1usize, 2, 63, 64, 65, 200] {
        let data = rng.vec(n * width, 1.0);
        let half: Vec<u16> = data.iter().map(|&v| half::f16::from_f32(v).to_bits()).collect();
        let q = rng.vec(width, 3.0);
        let chosen: Vec<u32> = (0..n as u32).filter(|t| t % 3 != 1).collect();
        for set in [KeySet::All(n), KeySet::Chosen(&chosen)] {
            for keys in [Keys::F32 { data: &data, width }, Keys::F16 { data: &half, width }] {
                let run = |k: &Kernels| {
                    let mut out = vec![0.0; rank];
                    k.attend(&q, &keys, &set, 0.3, &mut out);
                    out
                };
                let want = run(p);
                for k in &others {
                    assert_eq!(bits(&run(k)), bits(&want), "attend {} n={n}", k.isa());
                }
                let row = |t: usize| -> Vec<f64> {
                    (0..width)
                        .map(|j| match keys {
                            Keys::F32 { .. } => f64::from(data[t * width + j]),
                            Keys::F16 { .. } => half::f16::from_bits(half[t * width + j]).to_f64(),
                        })
                        .collect()
                };
                let mut sum = 0.0;
                let mut mean = vec![0.0; rank];
                for i in 0..set.len() {
                    let row = row(set.at(i));
                    let s: f64 = row.iter().zip(&q).map(|(a, &b)| a * f64::from(b)).sum();
                    let e = (s * 0.3).exp();
                    sum += e;
                    mean.iter_mut().zip(&row).for_each(|(m, v)| *m += e * v);
                }
                for (got, want) in want.iter().zip(&mean) {
                    assert!((f64::from(*got) - want / sum).abs() < 1e-5, "attend n={n}");
                }
            }
        }
        let iq = rng.vec(4 * width, 1.0);
        let iw = rng.vec(4, 1.0);
        let keys = Keys::F16 { data: &half, width };
        let run = |k: &Kernels| {
            let mut out = vec![0.0; n];
            k.index_scores(&iq, &iw, &keys, 0, 0.25, &mut out);
            bits(&out)
        };
        for k in &others {
            assert_eq!(run(k), run(p), "index_scores {} n={n}", k.isa());
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
