//! Model files: which tensors exist, where their bytes are, and borrowed access to them.
//!
//! A [`Shards`] holds every `*.safetensors` of a directory, memory-mapped, with all headers checked: ranges inside the
//! file, no overlaps, no duplicate names, sizes that agree with dtype and shape. It knows nothing of what a tensor is
//! for. Maps are private and read-only; truncating a file under a running process is outside the contract (the system
//! answers a read of a vanished page with SIGBUS).

mod header;
pub mod quant;
pub mod random;
mod resident;

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail, ensure};
use memmap2::{Mmap, MmapMut};
pub use safetensors::Dtype;

pub use header::dtype_bytes;
pub use resident::{huge_pages, settle};

use crate::kernels::{Format, MatView};

/// Most files in one model directory.
const MAX_FILES: usize = 4096;

/// Bytes of one model file.
enum Data {
    /// The file itself.
    Mapped(Mmap),
    /// Memory that was filled and is only read from now on.
    Settled(Mmap),
    Static(&'static [u8]),
    Owned(Vec<u8>),
    Buffer(MmapMut),
}

/// One model file and its bytes.
pub struct ShardFile {
    /// Where it came from, for messages.
    pub path: PathBuf,
    data: Data,
}

impl ShardFile {
    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        match &self.data {
            Data::Mapped(m) | Data::Settled(m) => m,
            Data::Static(b) => b,
            Data::Owned(b) => b,
            Data::Buffer(b) => b,
        }
    }

    /// Whether the bytes are those of a file on disk, which can be read again with positioned reads.
    pub fn on_disk(&self) -> bool {
        matches!(self.data, Data::Mapped(_))
    }

    /// Memory that holds a part of the file at `path`.
    pub fn in_buffer(path: &Path, buffer: MmapMut) -> Arc<Self> {
        Arc::new(Self { path: path.to_owned(), data: Data::Buffer(buffer) })
    }

    /// The memory given to [`ShardFile::in_buffer`], once nothing refers to it any more.
    pub fn into_buffer(file: Arc<Self>) -> Option<MmapMut> {
        match Arc::into_inner(file)?.data {
            Data::Buffer(buffer) => Some(buffer),
            _ => None,
        }
    }
}

/// Where one tensor lies.
#[derive(Clone, Debug)]
pub struct TensorRef {
    /// Index into [`Shards::files`].
    pub file: usize,
    /// First byte in the file.
    pub start: usize,
    /// One past the last byte in the file.
    pub end: usize,
    /// Stored number type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Vec<usize>,
}

impl TensorRef {
    /// Stored bytes.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether the tensor has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A counted reference to a range of a model file, or to memory of its own.
#[derive(Clone)]
pub struct Bytes {
    file: Arc<ShardFile>,
    start: usize,
    end: usize,
}

impl Bytes {
    /// Memory that belongs to no file; `label` names it in messages.
    pub fn owned(data: Vec<u8>, label: &str) -> Self {
        let end = data.len();
        let file = ShardFile { path: PathBuf::from(label), data: Data::Owned(data) };
        Self { file: Arc::new(file), start: 0, end }
    }

    /// The bytes `range` of a file or buffer.
    ///
    /// # Panics
    /// When the range is not inside.
    pub fn of(file: &Arc<ShardFile>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= file.bytes().len(), "bytes of a file");
        Self { file: Arc::clone(file), start: range.start, end: range.end }
    }

    /// The file they lie in.
    pub fn file(&self) -> &Arc<ShardFile> {
        &self.file
    }

    /// Where they lie in their file.
    pub fn range(&self) -> Range<usize> {
        self.start..self.end
    }

    /// The bytes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        &self.file.bytes()[self.start..self.end]
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file they lie in.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Tells the system that all of them will be read soon.
    fn will_need(&self) {
        #[cfg(unix)]
        if let Data::Mapped(map) = &self.file.data {
            // Advice only: a system that refuses it reads when the bytes are touched.
            let _ = map.advise_range(memmap2::Advice::WillNeed, self.start, self.len());
        }
    }

    /// Tells the system that they will not be read for a while: they no longer count as memory of this process.
    fn let_go(&self) {
        #[cfg(unix)]
        if let Data::Mapped(map) = &self.file.data {
            // SAFETY: the map is one of a file and is only read, so pages that are dropped come back from the file with
            // the same bytes.
            let _ = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                map.unchecked_advise_range(advice, self.start, self.len())
            };
        }
    }
}

/// The f32 scales of a matrix: read in place where the file aligns them, else copied when first used.
#[derive(Clone)]
pub struct Scales {
    bytes: Bytes,
    copied: OnceLock<Arc<[f32]>>,
}

impl Scales {
    /// Scales in little-endian f32 bytes; nothing is read yet.
    pub fn new(bytes: Bytes) -> Self {
        Self { bytes, copied: OnceLock::new() }
    }

    /// Scales that were computed.
    pub fn owned(scales: Vec<f32>) -> Self {
        Self { bytes: Bytes::owned(Vec::new(), ""), copied: OnceLock::from(Arc::from(scales)) }
    }

    /// Number of scales.
    pub fn len(&self) -> usize {
        self.copied.get().map_or(self.bytes.len() / 4, |v| v.len())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tells the system that all of them will be read soon.
    fn will_need(&self) {
        if self.copied.get().is_none() {
            self.bytes.will_need();
        }
    }

    /// The values.
    #[inline]
    pub fn as_slice(&self) -> &[f32] {
        if let Some(copied) = self.copied.get() {
            return copied;
        }
        let bytes = self.bytes.as_slice();
        cast_f32(bytes).unwrap_or_else(|| {
            let (words, _) = bytes.as_chunks::<4>();
            self.copied.get_or_init(|| words.iter().map(|b| f32::from_le_bytes(*b)).collect())
        })
    }
}

#[cfg(target_endian = "big")]
compile_error!("model files are little-endian and are read in place");

/// `bytes` as f32, if they are aligned and whole.
fn cast_f32(bytes: &[u8]) -> Option<&[f32]> {
    // SAFETY: every bit pattern is a valid f32; `align_to` takes care of alignment and of whole elements.
    let (head, body, tail) = unsafe { bytes.align_to::<f32>() };
    (head.is_empty() && tail.is_empty()).then_some(body)
}

/// One matrix, bound to its bytes.
#[derive(Clone)]
pub struct Mat {
    format: Format,
    rows: usize,
    cols: usize,
    layout: Layout,
    /// The file it came from, once it was moved into memory of its own.
    origin: Option<Arc<Path>>,
    /// Whether it stays as stored when it is moved, for a matrix whose rows are read one by one.
    rows_only: bool,
}

/// How the bytes of a matrix lie.
#[derive(Clone)]
enum Layout {
    /// As stored.
    Rows { codes: Bytes, scales: Scales },
    /// Strips of 16 rows, see `kernels::panel`.
    Panels(Bytes),
}

impl Mat {
    /// A matrix over `codes` and `scales`.
    ///
    /// # Panics
    /// When their sizes are not those of the format (checked by the caller against headers).
    pub fn new(format: Format, rows: usize, cols: usize, codes: Bytes, scales: Scales) -> Self {
        assert_eq!(codes.len(), rows * format.row_bytes(cols), "codes of a {rows}×{cols} {format}");
        assert_eq!(scales.len(), format.n_scales(rows, cols), "scales of a {rows}×{cols} {format}");
        Self {
            format,
            rows,
            cols,
            layout: Layout::Rows { codes, scales },
            origin: None,
            rows_only: false,
        }
    }

    /// The same matrix, not to be put into panels.
    pub fn kept_as_stored(self) -> Self {
        Self { rows_only: true, ..self }
    }

    /// A borrowed view for kernels.
    #[inline]
    pub fn view(&self) -> MatView<'_> {
        match &self.layout {
            Layout::Rows { codes, scales } => {
                MatView::new(self.format, self.rows, self.cols, codes.as_slice(), scales.as_slice())
            }
            Layout::Panels(strips) => {
                MatView::panels(self.format, self.rows, self.cols, strips.as_slice())
            }
        }
    }

    /// The bytes of the codes as stored, or of the panels.
    pub fn bytes(&self) -> &[u8] {
        match &self.layout {
            Layout::Rows { codes, .. } => codes.as_slice(),
            Layout::Panels(strips) => strips.as_slice(),
        }
    }

    /// Scales as stored; empty when the matrix lies in panels.
    fn view_scales(&self) -> &[f32] {
        match &self.layout {
            Layout::Rows { scales, .. } => scales.as_slice(),
            Layout::Panels(_) => &[],
        }
    }

    /// A copy of these rows, in this order, for formats whose scales belong to rows; `None` for fp8 and for panels.
    pub fn pick_rows(&self, rows: impl Iterator<Item = usize> + Clone) -> Option<Self> {
        if self.format == Format::Fp8 || matches!(self.layout, Layout::Panels(_)) {
            return None;
        }
        let view = self.view();
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for r in rows.clone() {
            codes.extend_from_slice(view.row_codes(r));
            scales.extend_from_slice(view.row_scales(r));
        }
        let codes = Bytes::owned(codes, &self.path().display().to_string());
        Some(Self::new(self.format, rows.count(), self.cols, codes, Scales::owned(scales)))
    }

    /// Codes and scales in their file; a format without scales has none. `None` when they are not as stored there.
    pub fn stored(&self) -> Option<(&Bytes, Option<&Bytes>)> {
        match &self.layout {
            Layout::Rows { codes, scales } if scales.is_empty() => Some((codes, None)),
            Layout::Rows { codes, scales } if scales.copied.get().is_none() => {
                Some((codes, Some(&scales.bytes)))
            }
            _ => None,
        }
    }

    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Stored format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The file that holds the codes.
    pub fn path(&self) -> &Path {
        match (&self.origin, &self.layout) {
            (Some(origin), _) => origin,
            (None, Layout::Rows { codes: bytes, .. } | Layout::Panels(bytes)) => bytes.path(),
        }
    }

    /// Bytes of codes and scales.
    pub fn total_bytes(&self) -> usize {
        self.format.total_bytes(self.rows, self.cols)
    }

    /// Fails on the first scale that is not finite. `name` is the tensor's.
    ///
    /// # Errors
    /// A scale is infinite or NaN.
    pub fn check_scales(&self, name: &str) -> Result<()> {
        let scales = self.view_scales();
        let bad = scales.iter().position(|s| !s.is_finite());
        bad.map_or(Ok(()), |i| {
            bail!(
                "{}: {name}: scale {i} of {} is {}, expected a finite number; the file is damaged",
                self.path().display(),
                scales.len(),
                scales[i]
            )
        })
    }
}

/// All tensors of a model, by name.
pub struct Shards {
    files: Vec<Arc<ShardFile>>,
    tensors: HashMap<String, TensorRef>,
    stamps: HashMap<String, (String, usize)>,
}

impl Shards {
    /// Maps every `*.safetensors` in `dir` and checks all headers.
    ///
    /// # Errors
    /// The directory cannot be read or has no such file; a header is damaged; two files hold the same tensor; format
    /// stamps disagree.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut paths = Vec::new();
        let entries = std::fs::read_dir(dir)
            .with_context(|| format!("cannot read directory {}", dir.display()))?;
        for entry in entries {
            let path =
                entry.with_context(|| format!("cannot read directory {}", dir.display()))?.path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                paths.push(path);
            }
        }
        paths.sort();
        ensure!(
            !paths.is_empty(),
            "{}: no *.safetensors file; expected a model directory",
            dir.display()
        );
        ensure!(
            paths.len() <= MAX_FILES,
            "{}: {} *.safetensors files, at most {MAX_FILES} are read",
            dir.display(),
            paths.len()
        );
        let files = paths.into_iter().map(map_file).collect::<Result<Vec<_>>>()?;
        Self::from_files(files)
    }

    /// Shards over bytes that are compiled into the program.
    ///
    /// # Errors
    /// The header is damaged.
    pub fn from_static(files: &[(&str, &'static [u8])]) -> Result<Self> {
        let file = |&(name, bytes): &(&str, &'static [u8])| ShardFile {
            path: PathBuf::from(name),
            data: Data::Static(bytes),
        };
        Self::from_files(files.iter().map(file).collect())
    }

    /// Shards over the bytes of one file; `name` stands for its path in messages.
    ///
    /// # Errors
    /// The header is damaged.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Self> {
        Self::from_files(vec![ShardFile { path: PathBuf::from(name), data: Data::Owned(bytes) }])
    }

    fn from_files(files: Vec<ShardFile>) -> Result<Self> {
        let mut shards =
            Self { files: Vec::new(), tensors: HashMap::new(), stamps: HashMap::new() };
        for (i, file) in files.into_iter().enumerate() {
            let shown = file.path.display().to_string();
            let header = header::parse(file.bytes(), i).with_context(|| shown.clone())?;
            shards.files.push(Arc::new(file));
            for (name, tensor) in header.tensors {
                if let Some(other) = shards.tensors.get(&name) {
                    let other = shards.files[other.file].path.display();
                    bail!(
                        "{shown}: {name}: this tensor is also in {other}; remove one of the two files"
                    );
                }
                shards.tensors.insert(name, tensor);
            }
            for (name, format) in header.stamps {
                if let Some((other, j)) = shards.stamps.get(&name).filter(|(f, _)| *f != format) {
                    let other_file = shards.files[*j].path.display();
                    bail!("{name}: stamped `{format}` by {shown} but `{other}` by {other_file}");
                }
                shards.stamps.insert(name, (format, i));
                ensure!(
                    shards.stamps.len() <= header::MAX_STAMPS,
                    "{shown}: more than {} format stamps in this container",
                    header::MAX_STAMPS
                );
            }
        }
        Ok(shards)
    }

    /// The files, in name order.
    pub fn files(&self) -> &[Arc<ShardFile>] {
        &self.files
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<&TensorRef> {
        self.tensors.get(name)
    }

    /// All tensor names, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The format name that a metadata stamp gives this tensor.
    pub fn stamp(&self, name: &str) -> Option<&str> {
        self.stamps.get(name).map(|(f, _)| f.as_str())
    }

    /// The file that holds `t`.
    pub fn path(&self, t: &TensorRef) -> &Path {
        &self.files[t.file].path
    }

    /// The bytes of `t`.
    pub fn bytes(&self, t: &TensorRef) -> Bytes {
        Bytes { file: Arc::clone(&self.files[t.file]), start: t.start, end: t.end }
    }
}

fn map_file(path: PathBuf) -> Result<ShardFile> {
    let shown = path.display().to_string();
    // Looked at before it is opened: opening a pipe would wait for a writer.
    let meta = std::fs::metadata(&path).with_context(|| format!("cannot open {shown}"))?;
    ensure!(meta.is_file(), "{shown}: not a regular file");
    let file = File::open(&path).with_context(|| format!("cannot open {shown}"))?;
    let len = file.metadata().with_context(|| format!("cannot read the size of {shown}"))?.len();
    if len == 0 {
        return Ok(ShardFile { path, data: Data::Owned(Vec::new()) });
    }
    // SAFETY: the map is private and read-only. A file that another process truncates meanwhile is outside the
    // contract stated at the top of this module.
    let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot map {shown}"))?;
    Ok(ShardFile { path, data: Data::Mapped(map) })
}
