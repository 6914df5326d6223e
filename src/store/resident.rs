//! Moving matrices into memory of their own: integer formats as panels, the others, and those kept so, as stored.
//!
//! The memory of a group of matrices is one anonymous map in huge pages. A mapped file has 4 KiB pages, whose address
//! translation costs a matrix product a third of the memory bandwidth.
#![forbid(unsafe_code)]

use std::sync::Arc;

use anyhow::{Context, Result};
use memmap2::MmapMut;

use super::{Bytes, Data, Layout, Mat, Scales, ShardFile};
use crate::kernels::{Kernels, panel_bytes};
use crate::pool::Pool;

/// Everything starts on a cache line.
const ALIGN: usize = 64;
/// Bytes that one task fills.
const TASK_BYTES: usize = 1 << 20;
/// Rows of a strip.
const STRIP: usize = 16;

/// Where one matrix goes in the group's memory.
struct Place {
    /// Panels, or codes as stored.
    codes: std::ops::Range<usize>,
    /// Scales as stored; empty for panels.
    scales: std::ops::Range<usize>,
    /// Bytes of a strip; `None` for codes as stored.
    strip: Option<usize>,
}

/// Copies the matrices into new memory, in parallel. Matrices that were moved before stay where they are.
///
/// # Errors
/// The system refuses the memory.
pub fn settle(mats: &mut [&mut Mat], kernels: &Kernels, pool: &Pool) -> Result<()> {
    let mut end = 0;
    let mut take = |n: usize| {
        let at = end;
        end += n.next_multiple_of(ALIGN);
        at..at + n
    };
    let mut moving: Vec<(&mut Mat, Place)> = Vec::new();
    for mat in mats.iter_mut().filter(|m| m.rows > 0 && m.origin.is_none()) {
        let Layout::Rows { codes, scales } = &mat.layout else { continue };
        let strip = panel_bytes(mat.format, 1, mat.cols).filter(|_| !mat.rows_only);
        let place = match strip {
            Some(strip) => Place {
                codes: take(mat.rows.div_ceil(STRIP) * strip),
                scales: 0..0,
                strip: Some(strip),
            },
            None => Place { codes: take(codes.len()), scales: take(4 * scales.len()), strip: None },
        };
        scales.will_need();
        codes.will_need();
        moving.push((mat, place));
    }
    if end == 0 {
        return Ok(());
    }
    let mut memory = huge_pages(end)?;
    fill(&mut memory, &moving, kernels, pool);
    let map = memory.make_read_only().context("cannot protect the memory of weights")?;
    let path = moving[0].0.path().to_owned();
    let file = Arc::new(ShardFile { path, data: Data::Settled(map) });
    for (mat, place) in moving {
        if let Layout::Rows { codes, scales } = &mat.layout {
            codes.let_go();
            scales.bytes.let_go();
        }
        // Messages name the file that a matrix came from, not the one of the group's first.
        let origin = mat.path().to_owned();
        let bytes = |r: &std::ops::Range<usize>| Bytes {
            file: Arc::clone(&file),
            start: r.start,
            end: r.end,
        };
        mat.layout = match place.strip {
            None => Layout::Rows {
                codes: bytes(&place.codes),
                scales: Scales::new(bytes(&place.scales)),
            },
            Some(_) => Layout::Panels(bytes(&place.codes)),
        };
        mat.origin = Some(Arc::from(origin));
    }
    Ok(())
}

/// Writes the group's memory: one task per part of a matrix.
fn fill(memory: &mut [u8], moving: &[(&mut Mat, Place)], kernels: &Kernels, pool: &Pool) {
    let mut rest = memory;
    let mut at = 0;
    let mut parts: Vec<(&Mat, Option<usize>, usize, &mut [u8])> = Vec::new();
    for (mat, place) in moving {
        let (_, tail) = std::mem::take(&mut rest).split_at_mut(place.codes.start - at);
        let (codes, tail) = tail.split_at_mut(place.codes.len());
        at = place.codes.end;
        let unit = place.strip.unwrap_or(1);
        let size = (TASK_BYTES / unit).max(1) * unit;
        for (i, part) in codes.chunks_mut(size).enumerate() {
            parts.push((mat, place.strip, i * (size / unit), part));
        }
        rest = tail;
        if !place.scales.is_empty() {
            let (_, tail) = std::mem::take(&mut rest).split_at_mut(place.scales.start - at);
            let (scales, tail) = tail.split_at_mut(place.scales.len());
            at = place.scales.end;
            let values = mat.view_scales();
            for (out, v) in scales.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *out = v.to_le_bytes();
            }
            rest = tail;
        }
    }
    pool.par_each(parts, |(mat, strip, first, out)| {
        let Layout::Rows { codes, .. } = &mat.layout else { return };
        match strip {
            Some(strip) => {
                let view = mat.view();
                for (i, out) in out.chunks_mut(strip).enumerate() {
                    kernels.pack_strip(&view, first + i, out);
                }
            }
            None => out.copy_from_slice(&codes.as_slice()[first..first + out.len()]),
        }
    });
}

/// Zeroed memory in huge pages where the system has them.
///
/// # Errors
/// The system refuses the memory.
pub fn huge_pages(bytes: usize) -> Result<MmapMut> {
    let memory = MmapMut::map_anon(bytes).with_context(|| {
        format!("cannot get {bytes} bytes of memory for weights; close other programs or use a smaller model")
    })?;
    // Advice only: without huge pages everything works, more slowly.
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    Ok(memory)
}
