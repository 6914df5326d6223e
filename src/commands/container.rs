//! What the commands that write a model share: the empty directory, the division into files, and files that appear
//! under their names only when they are whole.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;
use safetensors::tensor::View;
use serde_json::{Map, Value};

use crate::kernels::Format;
use crate::model::census::Found;
use crate::model::config::Config;
use crate::model::weights::{self, Class};
use crate::store::{dtype_bytes, quant};

/// Where a file ends: `convert` goes on to the end of a layer, `synth` stays below.
pub(super) const SHARD_BYTES: usize = 4 << 30;

/// Makes the directory, or makes sure that it is empty: a second model must not mix with a first, nor with its source.
pub(super) fn prepare_destination(dst: &Path, src: Option<&Path>) -> Result<()> {
    let shown = dst.display();
    ensure!(!dst.exists() || dst.is_dir(), "{shown}: not a directory; name a new one");
    std::fs::create_dir_all(dst).with_context(|| format!("cannot make directory {shown}"))?;
    if let (Some(Ok(src)), Ok(inner)) = (src.map(Path::canonicalize), dst.canonicalize()) {
        ensure!(
            !inner.starts_with(&src),
            "{shown}: lies inside the source; name a directory elsewhere"
        );
    }
    let entries =
        std::fs::read_dir(dst).with_context(|| format!("cannot read directory {shown}"))?;
    if entries.count() > 0 {
        // The side files come last, so a model without them was cut short.
        if dst.join("config.json").exists() {
            bail!("{shown}: the output directory is not empty; name a new one");
        }
        bail!(
            "{shown}: the output directory is not empty, perhaps a run that was killed; delete it or name a new one"
        );
    }
    Ok(())
}

/// Main model, indexer and MTP layer go to files of their own, as containers in circulation have them.
pub(super) fn parts<'a>(
    config: &Config,
    found: &'a [Found],
) -> [(&'static str, Vec<&'a Found>); 3] {
    let is_mtp = |f: &Found| f.layer == Some(config.n_layers);
    let is_index = |f: &Found| weights::is_indexer(&f.name);
    let pick = |want: &dyn Fn(&Found) -> bool| found.iter().filter(|f| want(f)).collect();
    [
        ("out", pick(&|f| !is_mtp(f) && !is_index(f))),
        ("out-idx", pick(&|f| !is_mtp(f) && is_index(f))),
        ("out-mtp", pick(&is_mtp)),
    ]
}

/// The bytes of a tensor, in memory or made when they are written.
pub(super) trait Data {
    /// The bytes.
    fn bytes(&self) -> Cow<'_, [u8]>;
}

impl Data for Vec<u8> {
    fn bytes(&self) -> Cow<'_, [u8]> {
        self.as_slice().into()
    }
}

/// One stored tensor.
struct Entry<D> {
    dtype: Dtype,
    shape: Vec<usize>,
    data: D,
}

impl<D: Data> View for Entry<D> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.data.bytes()
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * dtype_bytes(self.dtype).unwrap_or(0)
    }
}

/// One output file in the making.
pub(super) struct Shard<D> {
    entries: Vec<(String, Entry<D>)>,
    stamps: Map<String, Value>,
    bytes: usize,
}

impl<D: Data> Shard<D> {
    pub(super) fn new() -> Self {
        Self { entries: Vec::new(), stamps: Map::new(), bytes: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of the tensors so far.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a tensor with its shape.
    pub(super) fn push(&mut self, name: String, dtype: Dtype, shape: Vec<usize>, data: D) {
        let entry = Entry { dtype, shape, data };
        self.bytes += entry.data_len();
        self.entries.push((name, entry));
    }

    /// Adds a matrix packed in `format`: flat codes, flat scales, and a stamp unless it belongs to a routed expert.
    pub(super) fn push_packed(&mut self, f: &Found, format: Format, codes: D, scales: D) {
        if f.class != Class::Expert {
            self.stamps.insert(f.name.clone(), quant::stamp_name(format).into());
        }
        let n_scales = format.n_scales(f.rows, f.cols);
        self.push(format!("{}.qs", f.name), Dtype::F32, vec![n_scales], scales);
        self.push(f.name.clone(), Dtype::U8, vec![f.rows * format.row_bytes(f.cols)], codes);
    }
}

/// Writes numbered files; each appears under its name only when it is whole.
pub(super) struct Writer {
    dst: PathBuf,
    written: Vec<(&'static str, PathBuf)>,
    bytes: u64,
}

impl Writer {
    /// Writes into `dst`, which exists and is empty.
    pub(super) fn new(dst: &Path) -> Self {
        Self { dst: dst.to_owned(), written: Vec::new(), bytes: 0 }
    }

    /// Files so far.
    pub(super) fn files(&self) -> usize {
        self.written.len()
    }

    /// Bytes of the files so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes the next file of `prefix`.
    ///
    /// # Errors
    /// It cannot be written; then the files before it are gone too.
    pub(super) fn write<D: Data>(&mut self, prefix: &'static str, shard: Shard<D>) -> Result<()> {
        let number = self.written.iter().filter(|(p, _)| *p == prefix).count();
        let path = self.dst.join(format!("{prefix}-{number:05}.safetensors"));
        let part = path.with_extension("safetensors.part");
        // One key, so that the same input gives the same bytes: the map has no order.
        let metadata =
            HashMap::from([("colibri.fmt".to_owned(), Value::Object(shard.stamps).to_string())]);
        let written = safetensors::serialize_to_file(shard.entries, Some(metadata), &part)
            .with_context(|| format!("cannot write {}", part.display()))
            .and_then(|()| {
                std::fs::rename(&part, &path).with_context(|| {
                    format!("cannot rename {} to {}", part.display(), path.display())
                })
            });
        if let Err(e) = written {
            // Best effort: the first error is the one to report.
            let _ = std::fs::remove_file(&part);
            self.undo();
            return Err(e);
        }
        self.bytes += std::fs::metadata(&path).map_or(0, |m| m.len());
        self.written.push((prefix, path));
        Ok(())
    }

    /// Removes what was written: half a model is no model.
    pub(super) fn undo(&mut self) {
        for (_, path) in self.written.drain(..) {
            let _ = std::fs::remove_file(path);
        }
    }
}
