//! Products, plain reads and attention: bytes and operations per second, one thread.
//!
//! `cargo bench --bench kernels`; `glm bench kernels` measures the same without a toolchain, on several threads.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use glm::kernels::{Activations, Acts, Format, Kernels, Keys, Seen};
use glm::pool::{Pool, TileMut};
use glm::store::{Bytes, Mat, Scales, settle};

fn main() {
    divan::main();
}

/// GLM-5.2's experts: gate and up, down.
const SHAPES: [(usize, usize); 2] = [(2048, 6144), (6144, 2048)];
const FORMATS: [Format; 3] = [Format::Int4 { group: 64 }, Format::Int8, Format::Bf16];
const BATCHES: [usize; 6] = [1, 4, 8, 16, 64, 512];

/// Small numbers that repeat after a prime.
fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 37 % 251) as f32 / 125.0 - 1.0).collect()
}

fn matrix(format: Format, (rows, cols): (usize, usize)) -> Mat {
    let codes: Vec<u8> = match format {
        Format::Bf16 => values(rows * cols)
            .iter()
            .flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())
            .collect(),
        f => (0..rows * f.row_bytes(cols)).map(|i| (i * 31 % 241) as u8).collect(),
    };
    let scales = Scales::owned(vec![1e-3; format.n_scales(rows, cols)]);
    let mut mat = Mat::new(format, rows, cols, Bytes::owned(codes, "bench"), scales);
    let pool = Pool::new(1);
    settle(&mut [&mut mat], Kernels::best(), &pool).expect("memory for one matrix");
    mat
}

/// Every format, shape and batch.
fn products() -> impl Iterator<Item = (Format, usize, usize)> {
    let shapes = |f| (0..SHAPES.len()).map(move |s| (f, s));
    let batches = |(f, s)| BATCHES.into_iter().map(move |b| (f, s, b));
    FORMATS.into_iter().flat_map(shapes).flat_map(batches)
}

#[divan::bench(args = products().map(|(f, s, b)| format!("{f} {:?} {b}", SHAPES[s])))]
fn product(bencher: Bencher<'_, '_>, name: &str) {
    let wanted = |(f, s, b): &(Format, usize, usize)| format!("{f} {:?} {b}", SHAPES[*s]) == name;
    let (format, shape, batch) = products().find(wanted).expect("a name from the list");
    let (mat, kernels) = (matrix(format, SHAPES[shape]), Kernels::best());
    let (rows, cols) = SHAPES[shape];
    let mut x = Acts::default();
    x.fill(batch, cols).copy_from_slice(&values(batch * cols));
    assert!(x.prepare(kernels, Activations::Q8));
    let mut y = vec![0.0; batch * rows];
    bencher
        .counter(BytesCount::new(mat.total_bytes()))
        .counter(ItemsCount::new(2 * batch * rows * cols))
        .bench_local(|| {
            let view = black_box(&mat).view();
            kernels.matmul(&view, 0, &x.input(0), &mut TileMut::whole(&mut y, rows));
        });
}

#[divan::bench(args = [0, 1, 2])]
fn stream(bencher: Bencher<'_, '_>, format: usize) {
    let (mat, kernels) = (matrix(FORMATS[format], SHAPES[0]), Kernels::best());
    bencher
        .counter(BytesCount::new(mat.bytes().len()))
        .bench_local(|| kernels.stream(black_box(mat.bytes()), 1024));
}

/// 64 heads of one position over a cache of latents, 16 heads at a time as in decoding.
#[divan::bench(args = [1024, 8192, 65536])]
fn attend(bencher: Bencher<'_, '_>, keys: usize) {
    let (heads, group, width, rank) = (64, 16, 576, 512);
    let data: Vec<u16> =
        values(keys * width).iter().map(|&v| half::f16::from_f32(v).to_bits()).collect();
    let (q, kernels) = (values(group * width), Kernels::best());
    let mut out = vec![0.0; group * rank];
    let seen = vec![keys; group];
    bencher
        .counter(BytesCount::new(2 * data.len()))
        .counter(ItemsCount::new(2 * heads * keys * (width + rank)))
        .bench_local(|| {
            let keys = Keys::F16 { data: black_box(&data), width };
            for _ in 0..heads / group {
                kernels.attend(&q, &keys, &Seen::First(&seen), 0.1, &mut out);
            }
        });
}

/// The indexer's 32 heads of one position.
#[divan::bench(args = [1024, 8192, 65536])]
fn index_scores(bencher: Bencher<'_, '_>, keys: usize) {
    let (heads, width) = (32, 128);
    let data: Vec<u16> =
        values(keys * width).iter().map(|&v| half::f16::from_f32(v).to_bits()).collect();
    let (q, w, kernels) = (values(heads * width), values(heads), Kernels::best());
    let mut out = vec![0.0; keys];
    bencher
        .counter(BytesCount::new(2 * data.len()))
        .counter(ItemsCount::new(2 * heads * keys * width))
        .bench_local(|| {
            let keys = Keys::F16 { data: black_box(&data), width };
            kernels.index_scores(&q, &w, &keys, 0, 0.1, &mut out);
        });
}
