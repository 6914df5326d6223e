//! The header of one safetensors file, checked entry by entry.
//!
//! Types come from the `safetensors` crate; the checks are ours because each refusal names the tensor, what was found
//! and what was expected.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fmt;

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::TensorRef;

/// Longest header that is parsed.
const MAX_HEADER_BYTES: u64 = 100 << 20;
/// Most format stamps in one container.
pub(super) const MAX_STAMPS: usize = 4096;
/// Metadata key of the format stamps.
const STAMP_KEY: &str = "colibri.fmt";

/// What a header says.
pub(super) struct Header {
    pub(super) tensors: Vec<(String, TensorRef)>,
    /// Tensor name → format name.
    pub(super) stamps: HashMap<String, String>,
}

/// Bytes of one element, for the dtypes that are read.
pub fn dtype_bytes(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::U8 | Dtype::I8 | Dtype::F8_E4M3 | Dtype::F8_E8M0 => Some(1),
        Dtype::BF16 | Dtype::F16 => Some(2),
        Dtype::F32 => Some(4),
        Dtype::I64 | Dtype::U64 => Some(8),
        _ => None,
    }
}

/// Parses and checks the header of `file`, whose index is `index`.
pub(super) fn parse(file: &[u8], index: usize) -> Result<Header> {
    let Some((len, rest)) = file.split_first_chunk::<8>() else {
        bail!(
            "{} bytes, too short for a safetensors header; the download is incomplete",
            file.len()
        );
    };
    ensure!(
        !file.starts_with(b"version https://git-lfs"),
        "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
    );
    let len = u64::from_le_bytes(*len);
    ensure!(
        len <= MAX_HEADER_BYTES,
        "header length {len} exceeds the limit of {MAX_HEADER_BYTES} bytes; not a safetensors file"
    );
    ensure!(
        len <= rest.len() as u64,
        "header of {len} bytes ends after the file ({} bytes); the file is truncated",
        file.len()
    );
    let (json, data) = rest.split_at(len as usize);
    let Entries(entries) = serde_json::from_slice(json).context("header is not valid JSON")?;

    let data_start = file.len() - data.len();
    let mut header = Header { tensors: Vec::with_capacity(entries.len()), stamps: HashMap::new() };
    for (name, value) in entries {
        if name == "__metadata__" {
            header.stamps = stamps(&value)?;
            continue;
        }
        let info: TensorInfo = serde_json::from_value(value)
            .with_context(|| format!("{name}: header entry is malformed"))?;
        let tensor = check(&name, info, data.len(), data_start, index)?;
        header.tensors.push((name, tensor));
    }
    refuse_overlaps(&header.tensors, data_start)?;
    Ok(header)
}

fn check(
    name: &str,
    info: TensorInfo,
    data_len: usize,
    data_start: usize,
    file: usize,
) -> Result<TensorRef> {
    let (a, b) = info.data_offsets;
    ensure!(a <= b, "{name}: data_offsets [{a}, {b}] are reversed");
    ensure!(
        b <= data_len,
        "{name}: data ends at byte {} but the file ends at byte {}; the file is truncated by {} bytes, download it again",
        data_start.saturating_add(b),
        data_start + data_len,
        b - data_len
    );
    let Some(size) = dtype_bytes(info.dtype) else {
        bail!("{name}: dtype {:?} is not supported", info.dtype);
    };
    let elements = info.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let bytes = elements.and_then(|n| n.checked_mul(size));
    let Some(bytes) = bytes else {
        bail!("{name}: shape {:?} overflows", info.shape);
    };
    ensure!(
        bytes == b - a,
        "{name}: shape {:?} of {:?} needs {bytes} bytes, but data_offsets span {}",
        info.shape,
        info.dtype,
        b - a
    );
    Ok(TensorRef {
        file,
        start: data_start + a,
        end: data_start + b,
        dtype: info.dtype,
        shape: info.shape,
    })
}

fn refuse_overlaps(tensors: &[(String, TensorRef)], data_start: usize) -> Result<()> {
    let mut by_start: Vec<_> = tensors.iter().filter(|(_, t)| !t.is_empty()).collect();
    by_start.sort_by_key(|(_, t)| t.start);
    for pair in by_start.windows(2) {
        let ((a, ta), (b, tb)) = (pair[0], pair[1]);
        ensure!(
            ta.end <= tb.start,
            "{b}: its bytes {}..{} overlap those of {a} ({}..{})",
            tb.start - data_start,
            tb.end - data_start,
            ta.start - data_start,
            ta.end - data_start
        );
    }
    Ok(())
}

/// Format stamps: a string that holds a flat JSON object, tensor name → format name.
fn stamps(metadata: &Value) -> Result<HashMap<String, String>> {
    let Some(value) = metadata.get(STAMP_KEY) else { return Ok(HashMap::new()) };
    let text = value.as_str().with_context(|| format!("metadata `{STAMP_KEY}` is not a string"))?;
    let Entries(entries) = serde_json::from_str(text).with_context(|| {
        format!("metadata `{STAMP_KEY}` does not hold a JSON object of tensors")
    })?;
    ensure!(
        entries.len() <= MAX_STAMPS,
        "metadata `{STAMP_KEY}` has {} entries, at most {MAX_STAMPS} are read",
        entries.len()
    );
    entries
        .into_iter()
        .map(|(name, format)| match format {
            Value::String(format) => Ok((name, format)),
            other => {
                bail!("metadata `{STAMP_KEY}`: the entry of {name} is {other}, expected a string")
            }
        })
        .collect()
}

/// A JSON object as a list, so that a repeated key is an error and not a silent choice.
struct Entries(Vec<(String, Value)>);

impl<'de> serde::Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut seen = std::collections::HashSet::new();
                let mut entries = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if !seen.insert(name.clone()) {
                        return Err(serde::de::Error::custom(format!("{name}: listed twice")));
                    }
                    entries.push((name, value));
                }
                Ok(Entries(entries))
            }
        }
        d.deserialize_map(V)
    }
}
