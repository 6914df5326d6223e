//! How often experts were chosen: a text file beside the model that outlives the process.
//!
//! Three numbers a line, `<layer> <expert> <count>`. The first two lines are `-1 <layers> <experts>`, the shape of the
//! model without its MTP layer, and `-2 <version> <hash of the engine's name>`. Other programs for the same models
//! read and write the same file, so nothing may be added to a line; lines with other negative numbers are skipped.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

/// Version of the format.
const VERSION: u64 = 1;
/// FNV-1a of "glm_moe_dsa".
const ENGINE: u64 = 3_815_245_270;
/// Largest file that is read.
const MAX_BYTES: u64 = 64 << 20;
/// Name of the file in a model directory.
pub const FILE_NAME: &str = ".coli_usage";

/// Shape of a model, as the file tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Layers without MTP.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
}

/// How often each expert was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    shape: Shape,
    /// (layers + 1, experts): the last row is the MTP layer's.
    counts: Vec<u64>,
}

impl Usage {
    /// Nothing was chosen yet.
    pub fn new(shape: Shape) -> Self {
        Self { shape, counts: vec![0; (shape.layers + 1) * shape.experts] }
    }

    /// Reads a file. One that does not exist, or is empty, has no counts. What another engine counted is taken only with
    /// `any_engine`: it may choose differently.
    ///
    /// # Errors
    /// The file cannot be read, is not of this format, or belongs to a model of another shape.
    pub fn read(path: &Path, shape: Shape, any_engine: bool) -> Result<Self> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::new(shape)),
            Err(e) => return Err(e).with_context(|| format!("cannot open {}", path.display())),
        };
        Self::parse(BufReader::new(file.take(MAX_BYTES + 1)), shape, any_engine)
            .with_context(|| path.display().to_string())
    }

    fn parse(mut text: impl BufRead, shape: Shape, any_engine: bool) -> Result<Self> {
        let mut usage = Self::new(shape);
        let (mut line, mut bytes) = (Vec::new(), 0);
        for number in 1.. {
            line.clear();
            let n = text.read_until(b'\n', &mut line).context("cannot read")?;
            if n == 0 {
                break;
            }
            bytes += n as u64;
            ensure!(bytes <= MAX_BYTES, "larger than {MAX_BYTES} bytes; this is no usage history");
            ensure!(
                number > 1 || !line.starts_with(b"IKU1"),
                "a binary usage file of another engine; expected text"
            );
            usage.take(&line, any_engine).with_context(|| format!("line {number}"))?;
        }
        Ok(usage)
    }

    /// Takes one line.
    fn take(&mut self, line: &[u8], any_engine: bool) -> Result<()> {
        let text = String::from_utf8_lossy(line);
        let fields: Vec<Option<i64>> =
            text.split_ascii_whitespace().map(|f| f.parse().ok()).collect();
        let [first, second, third] = match fields[..] {
            [] => return Ok(()),
            [Some(a), Some(b), Some(c)] => [a, b, c],
            _ => bail!("`{}`, expected three numbers: layer, expert, count", text.trim_end()),
        };
        let Shape { layers, experts } = self.shape;
        match first {
            -1 => ensure!(
                second == layers as i64 && third == experts as i64,
                "a history of {second} layers of {third} experts, this model has {layers} of {experts}"
            ),
            -2 => ensure!(
                second == VERSION as i64 && (any_engine || third == ENGINE as i64),
                "version {second} of engine {third}, expected {VERSION} of {ENGINE}; --usage FILE takes that of any engine"
            ),
            ..0 => {}
            _ => {
                let in_range = first <= layers as i64 && (0..experts as i64).contains(&second);
                ensure!(
                    in_range && third >= 0,
                    "layer {first}, expert {second}, count {third}: this model has layers 0 to {layers}, \
                     experts 0 to {}",
                    experts.saturating_sub(1)
                );
                let count = &mut self.counts[first as usize * experts + second as usize];
                *count = count.saturating_add(third as u64);
            }
        }
        Ok(())
    }

    /// Writes the file under another name and then renames it, so that it is always whole.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!("{name}.{}.tmp", std::process::id()));
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::new(File::create(&temporary)?);
            if self.total() > 0 {
                writeln!(out, "-1 {} {}", self.shape.layers, self.shape.experts)?;
                writeln!(out, "-2 {VERSION} {ENGINE}")?;
            }
            for (layer, id, count) in self.counts() {
                writeln!(out, "{layer} {id} {count}")?;
            }
            out.into_inner()?.sync_all()?;
            std::fs::rename(&temporary, path)
        };
        write().inspect_err(|_| drop(std::fs::remove_file(&temporary))).with_context(|| {
            format!("cannot write the usage history {} (--no-usage keeps none)", path.display())
        })
    }

    /// (layer, expert, count) of every expert that was chosen, ascending.
    pub fn counts(&self) -> impl Iterator<Item = (usize, u32, u64)> + '_ {
        let experts = self.shape.experts.max(1);
        let place = move |(i, &n): (usize, &u64)| (i / experts, (i % experts) as u32, n);
        self.counts.iter().enumerate().map(place).filter(|c| c.2 > 0)
    }

    /// Choices in all.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Share of choices that would have found their expert in a slot, had the `slots` hottest experts been there, MTP
    /// left out; `None` when nothing was chosen.
    pub fn hits(&self, slots: usize) -> Option<f64> {
        let mut counts = self.counts[..self.shape.layers * self.shape.experts].to_vec();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let sum = |counts: &[u64]| counts.iter().map(|&n| n as f64).sum::<f64>();
        let all = sum(&counts);
        (all > 0.0).then(|| sum(&counts[..slots.min(counts.len())]) / all)
    }

    /// Notes that an expert was chosen.
    pub fn add(&mut self, layer: usize, id: u32, times: u64) {
        // A model without experts has no counts.
        if let Some(count) = self.counts.get_mut(layer * self.shape.experts + id as usize) {
            *count = count.saturating_add(times);
        }
    }

    /// Makes the past count less, so that habits of long ago fade.
    pub fn decay(&mut self, factor: f64) {
        self.counts.iter_mut().for_each(|n| *n = (*n as f64 * factor).round() as u64);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.counts.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { layers: 3, experts: 4 };

    fn parse(text: &str) -> Result<Usage> {
        Usage::parse(text.as_bytes(), SHAPE, false)
    }

    #[test]
    fn what_is_written_is_read() {
        let path = std::env::temp_dir().join(format!("glm-usage-{}", std::process::id()));
        let mut usage = Usage::new(SHAPE);
        usage.write(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "no counts, no bytes");
        usage.add(1, 3, 7);
        usage.add(3, 0, 2);
        usage.write(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "-1 3 4\n-2 1 3815245270\n1 3 7\n3 0 2\n");
        assert_eq!(Usage::read(&path, SHAPE, false).unwrap(), usage);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Usage::read(&path, SHAPE, false).unwrap(), Usage::new(SHAPE));
        usage.decay(0.5);
        assert_eq!(usage.counts().collect::<Vec<_>>(), [(1, 3, 4), (3, 0, 1)]);
    }

    #[test]
    fn headers_are_optional_and_must_match() {
        let other = "-1 3 4\n-2 1 7\n0 0 5\n";
        assert_eq!(Usage::parse(other.as_bytes(), SHAPE, true).unwrap().total(), 5);
        assert_eq!(parse("1 2 3\n1 2 4\n-9 8 7\n").unwrap().total(), 7);
        for (text, why) in [
            ("-1 3 5\n", "line 1: a history of 3 layers of 5 experts"),
            ("-1 3 4\n-2 2 3815245270\n", "line 2: version 2"),
            ("-1 3 4\n-2 1 7\n", "line 2: version 1 of engine 7"),
            ("1 2\n", "expected three numbers"),
            ("1 2 3 4\n", "expected three numbers"),
            ("1 2 x\n", "expected three numbers"),
            ("4 0 1\n", "layer 4"),
            ("0 4 1\n", "expert 4"),
            ("0 0 -1\n", "count -1"),
            ("IKU1\0\0", "another engine"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }
}
