//! `glm bench kernels`: products and attention on synthetic data, each beside a plain read of the same bytes.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Random, print_rows, thread_counts};
use crate::cli::BenchKernelsArgs;
use crate::commands::measure::{AHEAD, median, read_all, seconds};
use crate::commands::{Outcome, Usage, cancel_flag, chosen_isa, progress_bar, round};
use crate::kernels::{Activations, Acts, Format, Isa, Kernels, Keys, Seen};
use crate::model::Compute;
use crate::pool::{Bands, Pool};
use crate::store::{Bytes, Mat, Scales, settle};
use crate::sys;

/// Seconds that one measurement should take at least.
const LEAST: f64 = 0.05;
/// GLM's attention: heads, width of a cache row, latent part of it; heads and width of the indexer.
const HEADS: usize = 64;
const WIDTH: usize = 576;
const RANK: usize = 512;
const INDEX_HEADS: usize = 32;
const INDEX_WIDTH: usize = 128;

/// One thing to measure: runs and streams over the same bytes.
struct Case<'a> {
    kernel: &'a str,
    format: String,
    rows: usize,
    cols: usize,
    batch: usize,
    /// Bytes and operations of one run.
    bytes: usize,
    ops: f64,
}

pub(super) fn measure_kernels(args: &BenchKernelsArgs) -> Result<Outcome> {
    let cancel = cancel_flag()?;
    let isa = chosen_isa(args.isa)?.unwrap_or_else(Isa::best);
    let kernels = Kernels::for_isa(isa)
        .ok_or_else(|| Usage(format!("this CPU lacks {isa}; `glm --version` lists what it has")))?;
    let formats: Vec<Format> =
        args.format
            .iter()
            .map(|f| {
                if f == "bf16" { Ok(Format::Bf16) } else { f.parse().map_err(|e: String| Usage(e)) }
            })
            .collect::<Result<_, _>>()?;
    let bar = progress_bar(args.report.json, None, "measuring");
    let mut rows = Vec::new();
    for threads in thread_counts(&args.threads, &[sys::default_threads()]) {
        let compute = Compute { kernels, pool: Pool::new(threads), activations: Activations::Q8 };
        for &format in &formats {
            for shape in &args.shape {
                let (r, c) = shape.split_once('x').context("a shape")?;
                let (r, c): (usize, usize) = (r.parse()?, c.parse()?);
                let cold = (args.cold as usize).saturating_mul(1_000_000);
                let n = cold.div_ceil(format.total_bytes(r, c));
                // Once hot, once cold.
                for n in [1, n].into_iter().take(if n > 1 { 2 } else { 1 }) {
                    let mut mats = matrices(format, r, c, n);
                    settle(&mut mats.iter_mut().collect::<Vec<_>>(), kernels, &compute.pool)?;
                    for &batch in &args.batch {
                        if stop(cancel) {
                            return Ok(Outcome::Interrupted);
                        }
                        rows.push(product(&compute, &mats, batch as usize, args.report.reps));
                        bar.inc(1);
                    }
                }
            }
        }
        for &keys in args.keys.iter().filter(|&&k| k > 0) {
            if stop(cancel) {
                return Ok(Outcome::Interrupted);
            }
            rows.extend(attention(&compute, keys as usize, args.report.reps));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    print_rows(args.report.json, &rows, 12)?;
    Ok(Outcome::Done)
}

fn stop(cancel: &AtomicBool) -> bool {
    cancel.load(Ordering::Relaxed)
}

/// `n` copies of one matrix with random codes and scales of about 1/1000.
fn matrices(format: Format, rows: usize, cols: usize, n: usize) -> Vec<Mat> {
    let mut random = Random(1);
    let codes: Vec<u8> = match format {
        // Numbers between 1 and 2, and -1 and -2.
        Format::Bf16 => {
            let mut code = || (0x3f80 | (random.next() >> 24) as u16 & 0x807f).to_le_bytes();
            (0..rows * cols).flat_map(|_| code()).collect()
        }
        // No NaN.
        Format::Fp8 => (0..rows * cols).map(|_| random.byte() & 0xf7).collect(),
        f => (0..rows * f.row_bytes(cols)).map(|_| random.byte()).collect(),
    };
    let scales = (0..format.n_scales(rows, cols)).map(|_| 1e-3 + random.f32() * 1e-4).collect();
    let one = Mat::new(format, rows, cols, Bytes::owned(codes, "synthetic"), Scales::owned(scales));
    vec![one; n]
}

fn product(compute: &Compute, mats: &[Mat], batch: usize, reps: u32) -> Value {
    let (rows, cols, format) = (mats[0].rows(), mats[0].cols(), mats[0].format());
    let mut random = Random(2);
    let mut x = Acts::default();
    x.fill(batch, cols).iter_mut().for_each(|v| *v = random.f32());
    // The values are finite by construction.
    let _ = compute.prepare(&mut x);
    let mut y = vec![0.0; batch * rows];
    let case = Case {
        kernel: if mats.len() == 1 { "matmul-hot" } else { "matmul-cold" },
        format: format.to_string(),
        rows,
        cols,
        batch,
        bytes: mats.iter().map(Mat::total_bytes).sum(),
        ops: 2.0 * (batch * rows * cols * mats.len()) as f64,
    };
    let parts: Vec<&[u8]> = mats.iter().map(Mat::bytes).collect();
    measure(compute, &case, reps, &parts, || {
        for mat in mats {
            compute.matmul(mat, x.input(0), batch, &mut y);
        }
    })
}

/// Softmax attention of one position's heads over a cache, and the indexer's scores of as many keys.
fn attention(compute: &Compute, n: usize, reps: u32) -> [Value; 2] {
    let mut random = Random(3);
    let mut halves = |n: usize| -> Vec<u16> {
        (0..n).map(|_| half::f16::from_f32(random.f32()).to_bits()).collect()
    };
    let (latents, index) = (halves(n * WIDTH), halves(n * INDEX_WIDTH));
    let mut floats = |n: usize| -> Vec<f32> { (0..n).map(|_| random.f32()).collect() };
    let (q, iq, iw) =
        (floats(HEADS * WIDTH), floats(INDEX_HEADS * INDEX_WIDTH), floats(INDEX_HEADS));
    let bytes: Vec<u8> = latents.iter().flat_map(|h| h.to_le_bytes()).collect();
    let index_bytes: Vec<u8> = index.iter().flat_map(|h| h.to_le_bytes()).collect();
    let case = |kernel, rows, cols, ops: usize| Case {
        kernel,
        format: "f16".to_owned(),
        rows,
        cols,
        batch: 1,
        bytes: n * cols * 2,
        ops: 2.0 * ops as f64,
    };
    let keys = Keys::F16 { data: &latents, width: WIDTH };
    let mut out = vec![0.0; HEADS * RANK];
    let group = HEADS.div_ceil(4 * compute.pool.threads()).max(1);
    let seen = vec![n; group];
    let attend = measure(
        compute,
        &case("attend", n, WIDTH, n * HEADS * (WIDTH + RANK)),
        reps,
        &[&bytes],
        || {
            compute.pool.par_tiles(&mut out, RANK, Bands::Every(group), RANK, |_, mut tile| {
                let heads = tile.rows();
                let mut mean = vec![0.0; heads.len() * RANK];
                let q = &q[heads.start * WIDTH..heads.end * WIDTH];
                let seen = Seen::First(&seen[..heads.len()]);
                compute.kernels.attend(q, &keys, &seen, 0.1, &mut mean);
                for (i, mean) in mean.chunks(RANK).enumerate() {
                    tile.row(i).copy_from_slice(mean);
                }
            });
        },
    );
    let keys = Keys::F16 { data: &index, width: INDEX_WIDTH };
    let mut scores = vec![0.0; n];
    let chunk = compute.chunk(n, INDEX_HEADS * INDEX_WIDTH, 1);
    let scored = measure(
        compute,
        &case("index", n, INDEX_WIDTH, n * INDEX_HEADS * INDEX_WIDTH),
        reps,
        &[&index_bytes],
        || {
            compute.pool.par_tiles(&mut scores, n, Bands::Every(1), chunk, |_, mut tile| {
                let first = tile.cols().start;
                compute.kernels.index_scores(&iq, &iw, &keys, first, 0.1, tile.row(0));
            });
        },
    );
    [attend, scored]
}

/// Median speeds of `run` and of reading `parts`, alternating.
fn measure(
    compute: &Compute,
    case: &Case<'_>,
    reps: u32,
    parts: &[&[u8]],
    mut run: impl FnMut(),
) -> Value {
    run();
    let once = seconds(&mut run);
    let times = ((LEAST / once.max(1e-9)) as usize).clamp(1, 100_000);
    let (mut kernel, mut stream) = (Vec::new(), Vec::new());
    for _ in 0..reps {
        kernel.push(seconds(|| (0..times).for_each(|_| run())) / times as f64);
        let read = |ahead| {
            let t = seconds(|| (0..times).for_each(|_| read_all(compute, parts, ahead)));
            t / times as f64
        };
        stream.push(AHEAD.into_iter().map(read).fold(f64::INFINITY, f64::min));
    }
    let size: usize = parts.iter().map(|p| p.len()).sum();
    let (kernel, stream) = (median(&mut kernel), median(&mut stream));
    let gbps = case.bytes as f64 / kernel / 1e9;
    let stream_gbps = size as f64 / stream / 1e9;
    json!({
        "kernel": case.kernel,
        "format": case.format,
        "isa": compute.kernels.isa().name(),
        "rows": case.rows,
        "cols": case.cols,
        "s": case.batch,
        "threads": compute.pool.threads(),
        "us": round(kernel * 1e6, 1),
        "gbps": round(gbps, 2),
        "gops": round(case.ops / kernel / 1e9, 1),
        "stream_gbps": round(stream_gbps, 2),
        "ratio": round(gbps / stream_gbps, 3),
    })
}
